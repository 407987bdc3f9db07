// How NIXL finds the backend.

#include <exception>

#include "engine.h"
#include "words.h"

namespace {

// What NIXL may call a backend of this plugin: the name of the file it was loaded from.
constexpr const char *NAMES[] = {"PEERWAY", "UCCL"};

nixlBackendEngine *create(const nixlBackendInitParams *init) {
    // Nothing tells which version of NIXL asks. Where the parameters are not where they are looked for, the name is none.
    bool is_known = false;
    for (const auto *name : NAMES) {
        is_known = is_known || init->type == name;
    }
    if (!is_known || init->customParams == nullptr) {
        say("?", "cannot make the backend", "this NIXL passes other parameters than 1.3 to 1.5, which this plugin is for");
        return nullptr;
    }
    try {
        return new Engine(init);
    } catch (const std::exception &error) {
        say(init->localAgent, "cannot make the backend", error.what());
        return nullptr;
    }
}

void destroy(nixlBackendEngine *engine) {
    delete engine;
}

const char *name() {
    return NAMES[0];
}

nixl_b_params_t parameters() {
    nixl_b_params_t all;
    for (const auto *parameter : PARAMETERS) {
        // Empty is as the environment says, or as usual.
        all.emplace(parameter, "");
    }
    return all;
}

nixl_mem_list_t memories() {
    return MEMORIES;
}

nixlBackendPlugin plugin = {
    nixl_plugin_api_version, create, destroy, name, peerway_version_text, parameters, memories,
};

} // namespace

extern "C" __attribute__((visibility("default"))) void *peerway_nixl_plugin() {
    return &plugin;
}
