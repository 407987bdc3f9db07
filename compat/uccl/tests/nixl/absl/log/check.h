// The part of Abseil's checks that NIXL's headers use. See log.h.
#pragma once

#include "absl/log/log.h"

#define CHECK(condition) shadow::Line(!(condition))
#define DCHECK(condition) shadow::Line(!(condition))
