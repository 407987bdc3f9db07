// NIXL's log.h includes this, and its plugin uses nothing of it.
#pragma once
