// NIXL's log.h includes this file, but its plugin uses nothing from it.
#pragma once
