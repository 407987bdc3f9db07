// The entry point of the plugin.

#include <exception>

#include "engine.h"
#include "words.h"

namespace {

// The names under which NIXL may load the backend. NIXL takes the name from the file's name.
constexpr const char *NAMES[] = {"PEERWAY", "UCCL"};

nixlBackendEngine *create(const nixlBackendInitParams *init) {
    // NIXL does not pass its version. If the layout of the parameters differs, `type` is not one of
    // the names.
    bool is_known = false;
    for (const auto *name : NAMES) {
        is_known = is_known || init->type == name;
    }
    if (!is_known || init->customParams == nullptr) {
        say("?", "cannot create the backend", "this NIXL is incompatible: the plugin supports NIXL 1.3 to 1.5");
        return nullptr;
    }
    try {
        return new Engine(init);
    } catch (const std::exception &error) {
        say(init->localAgent, "cannot create the backend", error.what());
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
        // An empty value means the environment's value, or the default.
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
