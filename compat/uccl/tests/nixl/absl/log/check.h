// As log.h: what NIXL's headers use of Abseil's checks.
#pragma once

#include "absl/log/log.h"

#define CHECK(condition) shadow::Line(!(condition))
#define DCHECK(condition) shadow::Line(!(condition))
