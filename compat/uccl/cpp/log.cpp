#include "log.hpp"

#include <cstdio>
#include <cstdlib>
#include <strings.h>

#include <peerway.h>

namespace shim {

// All messages are errors, so only levels above "error" silence them. libpeerway reads the same
// variables.
static bool is_silent() {
    for (const char *name : {"PEERWAY_LOG_LEVEL", "UCCL_P2P_LOG_LEVEL", "UCCL_DEBUG"}) {
        const char *level = std::getenv(name);
        if (!level || !*level) continue;
        for (const char *silent : {"off", "fatal", "abort", "3"})
            if (!strcasecmp(level, silent)) return true;
        return false;
    }
    return false;
}

int complain(const char *call, const std::string &why) {
    static const bool silent = is_silent();
    if (!silent) std::fprintf(stderr, "peerway: %s: %s\n", call, why.c_str());
    return -1;
}

int complain_of_engine(const char *call) { return complain(call, peerway_last_error()); }

} // namespace shim
