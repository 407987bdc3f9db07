#include "engine.h"

#include <algorithm>
#include <cctype>
#include <stdexcept>
#include <vector>

#include "request.h"
#include "words.h"

namespace {

// Parameters of NIXL's own UCCL backend, which this backend can replace. They have no effect here.
constexpr const char *OF_UCCL[] = {"num_cpus", "in_python", "device_idx"};

// The name of the setting for a parameter.
std::string as_setting(const std::string &parameter) {
    std::string name = "PEERWAY_";
    std::transform(parameter.begin(), parameter.end(), std::back_inserter(name), [](unsigned char letter) {
        return static_cast<char>(std::toupper(letter));
    });
    return name;
}

std::string quoted(const std::string &name) {
    return "'" + name + "'";
}

} // namespace

Engine::Engine(const nixlBackendInitParams *init) : nixlBackendEngine(init) {
    std::vector<std::pair<std::string, std::string>> texts;
    for (const auto &[parameter, value] : *init->customParams) {
        const bool is_of_uccl = std::find(std::begin(OF_UCCL), std::end(OF_UCCL), parameter) != std::end(OF_UCCL);
        // Skip empty values of any name: programs pass empty parameters of other backends.
        if (!is_of_uccl && !value.empty()) {
            texts.emplace_back(as_setting(parameter), value);
        }
    }
    std::vector<peerway_setting> settings;
    for (const auto &[name, value] : texts) {
        settings.push_back({name.c_str(), value.c_str()});
    }
    peerway_endpoint_options options{};
    options.size = sizeof options;
    options.settings = settings.data();
    options.settings_count = settings.size();
    // The endpoint listens from here on, because NIXL distributes the connection info once the
    // engine exists.
    if (peerway_endpoint_new(&options, endpoint.made()) != PEERWAY_STATUS_OK) {
        say(localAgent, "cannot create the backend", peerway_last_error());
        initErr = true;
    }
}

nixl_mem_list_t Engine::getSupportedMems() const {
    return MEMORIES;
}

nixl_status_t Engine::registerMem(const nixlBlobDesc &memory, const nixl_mem_t &kind, nixlBackendMD *&out) {
    const std::string about = "cannot register " + std::to_string(memory.len) + " bytes";
    if (kind != DRAM_SEG && kind != VRAM_SEG) {
        say(localAgent, about, "only DRAM and VRAM can be registered");
        return NIXL_ERR_NOT_SUPPORTED;
    }
    if (memory.len == 0) {
        say(localAgent, about, "the length is zero");
        return NIXL_ERR_INVALID_PARAM;
    }
    auto made = std::make_unique<LocalMemory>();
    made->addr = memory.addr;
    made->len = memory.len;
    auto status = kind == VRAM_SEG
                      ? peerway_region_register_gpu(endpoint.get(), memory.addr, memory.len, made->region.made())
                      : peerway_region_register(endpoint.get(), reinterpret_cast<void *>(memory.addr), memory.len,
                                                made->region.made());
    if (status == PEERWAY_STATUS_OK) {
        status = peerway_region_advertise(made->region.get(), 0, UINT64_MAX, PEERWAY_ACCESS_READ_WRITE, nullptr,
                                          made->descriptor.data());
    }
    if (status != PEERWAY_STATUS_OK) {
        return failed(localAgent, about, status);
    }
    out = made.release();
    return NIXL_SUCCESS;
}

nixl_status_t Engine::deregisterMem(nixlBackendMD *memory) {
    const std::unique_ptr<LocalMemory> local(static_cast<LocalMemory *>(memory));
    // The program may free the memory after this call, so no agent may write to it any more.
    bool open = false;
    const auto status = peerway_region_revoke(local->region.get(), &open);
    if (status != PEERWAY_STATUS_OK) {
        return failed(localAgent, "cannot deregister memory", status);
    }
    if (open) {
        say(localAgent, "deregistered memory",
            "an agent did not confirm in time that it no longer writes to the memory: do not reuse or free it yet");
        return NIXL_ERR_BACKEND;
    }
    return NIXL_SUCCESS;
}

nixl_status_t Engine::getPublicData(const nixlBackendMD *memory, std::string &out) const {
    const auto &descriptor = static_cast<const LocalMemory *>(memory)->descriptor;
    out.assign(reinterpret_cast<const char *>(descriptor.data()), descriptor.size());
    return NIXL_SUCCESS;
}

nixl_status_t Engine::getConnInfo(std::string &out) const {
    size_t len = 0;
    auto status = peerway_endpoint_metadata(endpoint.get(), nullptr, 0, &len);
    if (status == PEERWAY_STATUS_TOO_SMALL || status == PEERWAY_STATUS_OK) {
        out.resize(len);
        status = peerway_endpoint_metadata(endpoint.get(), out.data(), out.size(), &len);
    }
    return status == PEERWAY_STATUS_OK ? NIXL_SUCCESS : failed(localAgent, "cannot read the connection info", status);
}

nixl_status_t Engine::loadRemoteConnInfo(const std::string &name, const std::string &conn_info) {
    // Check the connection info now, so that an error is reported at once. The connection is opened
    // by the first transfer.
    peerway_incarnation incarnation{};
    const auto status = peerway_metadata_incarnation(conn_info.data(), conn_info.size(), &incarnation);
    if (status != PEERWAY_STATUS_OK) {
        return failed(localAgent, "cannot load the connection info of agent " + quoted(name), status);
    }
    const std::lock_guard lock(knowing);
    auto &known = agents[name];
    // If the same connection info is loaded again, keep the session.
    if (!known || known->conn_info() != conn_info) {
        known = std::make_shared<RemoteAgent>(conn_info);
    }
    return NIXL_SUCCESS;
}

std::shared_ptr<RemoteAgent> Engine::agent(const std::string &name) const {
    const std::lock_guard lock(knowing);
    const auto found = agents.find(name);
    return found == agents.end() ? nullptr : found->second;
}

bool Engine::may_be(const std::string &name, const std::array<uint8_t, 16> &incarnation) const {
    peerway_incarnation proven{};
    if (name == localAgent) {
        if (peerway_endpoint_incarnation(endpoint.get(), &proven) != PEERWAY_STATUS_OK) {
            return false;
        }
    } else {
        const auto known = agent(name);
        if (!known) {
            return true;
        }
        const auto &metadata = known->conn_info();
        // The metadata was checked when it was loaded.
        if (peerway_metadata_incarnation(metadata.data(), metadata.size(), &proven) != PEERWAY_STATUS_OK) {
            return false;
        }
    }
    return std::equal(incarnation.begin(), incarnation.end(), std::begin(proven.bytes));
}

nixl_status_t Engine::connected(const std::string &name, std::shared_ptr<Peer> &peer) const {
    const auto known = agent(name);
    if (!known) {
        say(localAgent, "agent " + quoted(name), "its metadata is not loaded, or has no connection info for this backend");
        return NIXL_ERR_NOT_FOUND;
    }
    const auto status = known->peer(endpoint, peer);
    return status == PEERWAY_STATUS_OK ? NIXL_SUCCESS : failed(localAgent, "agent " + quoted(name), status);
}

nixl_status_t Engine::connect(const std::string &name) {
    if (name == localAgent) {
        // Only load the connection info. The first transfer of the agent to itself connects, and
        // most programs have none.
        std::string ours;
        const auto status = getConnInfo(ours);
        return status == NIXL_SUCCESS ? loadRemoteConnInfo(name, ours) : status;
    }
    std::shared_ptr<Peer> peer;
    return connected(name, peer);
}

nixl_status_t Engine::disconnect(const std::string &name) {
    // The session stays open, because the other agent may use it for its own transfers. It closes
    // with either agent.
    const std::lock_guard lock(knowing);
    return agents.erase(name) == 0 ? NIXL_ERR_NOT_FOUND : NIXL_SUCCESS;
}

nixl_status_t Engine::loadRemoteMD(const nixlBlobDesc &memory,
                                   const nixl_mem_t &,
                                   const std::string &name,
                                   nixlBackendMD *&out) {
    auto made = std::make_unique<RemoteMemory>();
    made->agent = agent(name);
    if (!made->agent || memory.metaInfo.size() != made->descriptor.size()) {
        say(localAgent, "cannot load memory of agent " + quoted(name),
            made->agent ? "its metadata is not from this backend" : "its connection info is not loaded");
        return made->agent ? NIXL_ERR_INVALID_PARAM : NIXL_ERR_NOT_FOUND;
    }
    made->addr = memory.addr;
    made->len = memory.len;
    std::copy(memory.metaInfo.begin(), memory.metaInfo.end(), made->descriptor.begin());
    out = made.release();
    return NIXL_SUCCESS;
}

nixl_status_t Engine::loadLocalMD(nixlBackendMD *memory, nixlBackendMD *&out) {
    const auto *local = static_cast<LocalMemory *>(memory);
    auto made = std::make_unique<RemoteMemory>();
    made->agent = agent(localAgent);
    made->addr = local->addr;
    made->len = local->len;
    made->descriptor = local->descriptor;
    out = made.release();
    return NIXL_SUCCESS;
}

nixl_status_t Engine::unloadMD(nixlBackendMD *memory) {
    delete memory;
    return NIXL_SUCCESS;
}

nixl_status_t Engine::pairs(const nixl_meta_dlist_t &local,
                            const nixl_meta_dlist_t &remote,
                            const std::shared_ptr<Peer> &peer,
                            std::vector<peerway_pair> &pairs) const {
    pairs.reserve(local.count());
    const RemoteMemory *last = nullptr;
    std::shared_ptr<Remote> imported;
    for (size_t i = 0; i < local.count(); ++i) {
        const auto &ours = local[i], &theirs = remote[i];
        const auto *from = static_cast<LocalMemory *>(ours.metadataP);
        auto *to = static_cast<RemoteMemory *>(theirs.metadataP);
        if (to != last) {
            const auto status = to->remote(peer, imported);
            if (status != PEERWAY_STATUS_OK) {
                return failed(localAgent, "memory of descriptor " + std::to_string(i), status);
            }
            last = to;
        }
        // An address below the region wraps to a large offset, which the engine refuses.
        pairs.push_back({from->region.get(), ours.addr - from->addr, imported->get(), theirs.addr - to->addr, ours.len});
    }
    return NIXL_SUCCESS;
}

nixl_status_t Engine::prepXfer(const nixl_xfer_op_t &operation,
                               const nixl_meta_dlist_t &local,
                               const nixl_meta_dlist_t &remote,
                               const std::string &name,
                               nixlBackendReqH *&handle,
                               const nixlBackendOptionalArgs *) const {
    const std::string about = "transfer with agent " + quoted(name);
    const size_t count = local.count();
    if (count != remote.count()) {
        say(localAgent, about,
            std::to_string(count) + " local descriptors, but " + std::to_string(remote.count()) + " remote ones");
        return NIXL_ERR_MISMATCH;
    }
    for (size_t i = 0; i < count; ++i) {
        if (local[i].len != remote[i].len) {
            say(localAgent, about,
                "descriptor " + std::to_string(i) + " has " + std::to_string(local[i].len) + " local bytes, but " +
                    std::to_string(remote[i].len) + " remote ones");
            return NIXL_ERR_MISMATCH;
        }
    }
    std::shared_ptr<Peer> peer;
    auto answer = connected(name, peer);
    std::vector<peerway_pair> list;
    if (answer == NIXL_SUCCESS) {
        answer = pairs(local, remote, peer, list);
    }
    if (answer != NIXL_SUCCESS) {
        return answer;
    }
    Batch batch;
    const uint32_t direction = operation == NIXL_WRITE ? PEERWAY_DIRECTION_WRITE : PEERWAY_DIRECTION_READ;
    const auto status = peerway_batch_vector(direction, list.data(), list.size(), nullptr, batch.made());
    if (status != PEERWAY_STATUS_OK) {
        return failed(localAgent, about, status);
    }
    auto request = std::make_unique<Request>(localAgent, name);
    answer = request->prepare(peer, batch);
    if (answer == NIXL_SUCCESS) {
        handle = request.release();
    }
    return answer;
}

nixl_status_t Engine::postXfer(const nixl_xfer_op_t &,
                               const nixl_meta_dlist_t &,
                               const nixl_meta_dlist_t &,
                               const std::string &,
                               nixlBackendReqH *&handle,
                               const nixlBackendOptionalArgs *options) const {
    const bool notifies = options != nullptr && options->hasNotif;
    return static_cast<Request *>(handle)->post(notifies ? &options->notifMsg : nullptr);
}

nixl_status_t Engine::checkXfer(nixlBackendReqH *handle) const {
    return static_cast<Request *>(handle)->check();
}

nixl_status_t Engine::releaseReqH(nixlBackendReqH *handle) const {
    auto *request = static_cast<Request *>(handle);
    // `stop` refuses with an exception. If it returned a status, NIXL would store it in the request
    // and free the request at the next release.
    if (!request->stop()) {
        return NIXL_ERR_REPOST_ACTIVE;
    }
    delete request;
    return NIXL_SUCCESS;
}

nixl_status_t Engine::getNotifs(notif_list_t &notifications) {
    const std::lock_guard lock(arriving);
    for (;;) {
        Notification notification;
        auto status = peerway_endpoint_notification(endpoint.get(), 0, notification.made());
        if (status == PEERWAY_STATUS_PENDING) {
            return NIXL_SUCCESS;
        }
        const void *message = nullptr;
        size_t len = 0;
        peerway_incarnation from{};
        if (status == PEERWAY_STATUS_OK) {
            status = peerway_notification_message(notification.get(), &message, &len, &from);
        }
        if (status != PEERWAY_STATUS_OK) {
            return failed(localAgent, "notifications", status);
        }
        std::array<uint8_t, 16> incarnation;
        std::copy(std::begin(from.bytes), std::end(from.bytes), incarnation.begin());
        std::string who, what, complaint;
        if (arrivals.take(incarnation, std::string(static_cast<const char *>(message), len), who, what, complaint)) {
            if (may_be(who, incarnation)) {
                notifications.emplace_back(std::move(who), std::move(what));
            } else {
                complaint = "dropped a notification under the name of agent " + quoted(who) +
                            ", which another endpoint sent; if the agent has restarted, load its new metadata";
            }
        }
        if (!complaint.empty()) {
            say(localAgent, "notifications", complaint);
        }
    }
}

nixl_status_t Engine::genNotif(const std::string &name, const std::string &message) const {
    std::shared_ptr<Peer> peer;
    const auto answer = connected(name, peer);
    if (answer != NIXL_SUCCESS) {
        return answer;
    }
    const auto parts = packed(localAgent, message);
    if (parts.empty()) {
        say(localAgent, "notification to agent " + quoted(name), std::to_string(message.size()) + " bytes are too many");
        return NIXL_ERR_INVALID_PARAM;
    }
    for (const auto &part : parts) {
        Transfer sent;
        auto status = peerway_peer_notify(peer->get(), part.data(), part.size(), sent.made());
        if (status == PEERWAY_STATUS_OK) {
            status = peerway_transfer_poll(sent.get(), nullptr);
        }
        if (status != PEERWAY_STATUS_OK && status != PEERWAY_STATUS_PENDING) {
            return failed(localAgent, "notification to agent " + quoted(name), status);
        }
    }
    return NIXL_SUCCESS;
}
