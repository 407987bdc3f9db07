// The engine as a NIXL backend.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "handle.h"
#include "nixl_abi.h"
#include "notifications.h"
#include "remote_agent.h"

class Engine : public nixlBackendEngine {
    Endpoint endpoint;

    mutable std::mutex knowing;
    std::unordered_map<std::string, std::shared_ptr<RemoteAgent>> agents;

    std::mutex arriving;
    Arrivals arrivals;

    std::shared_ptr<RemoteAgent> agent(const std::string &name) const;
    // Whether an endpoint with this proven identity may send under the name of an agent. An agent
    // whose metadata is loaded has one identity. Nothing is known about other names.
    bool may_be(const std::string &name, const std::array<uint8_t, 16> &incarnation) const;
    nixl_status_t connected(const std::string &name, std::shared_ptr<Peer> &peer) const;
    nixl_status_t pairs(const nixl_meta_dlist_t &local,
                        const nixl_meta_dlist_t &remote,
                        const std::shared_ptr<Peer> &peer,
                        std::vector<peerway_pair> &pairs) const;

  public:
    explicit Engine(const nixlBackendInitParams *init);

    bool supportsRemote() const override { return true; }
    bool supportsLocal() const override { return true; }
    bool supportsNotif() const override { return true; }
    nixl_mem_list_t getSupportedMems() const override;
    nixl_status_t registerMem(const nixlBlobDesc &memory, const nixl_mem_t &kind, nixlBackendMD *&out) override;
    nixl_status_t deregisterMem(nixlBackendMD *memory) override;
    nixl_status_t connect(const std::string &name) override;
    nixl_status_t disconnect(const std::string &name) override;
    nixl_status_t unloadMD(nixlBackendMD *memory) override;
    nixl_status_t prepXfer(const nixl_xfer_op_t &operation,
                           const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote,
                           const std::string &name,
                           nixlBackendReqH *&handle,
                           const nixlBackendOptionalArgs *options) const override;
    nixl_status_t postXfer(const nixl_xfer_op_t &operation,
                           const nixl_meta_dlist_t &local,
                           const nixl_meta_dlist_t &remote,
                           const std::string &name,
                           nixlBackendReqH *&handle,
                           const nixlBackendOptionalArgs *options) const override;
    nixl_status_t checkXfer(nixlBackendReqH *handle) const override;
    nixl_status_t releaseReqH(nixlBackendReqH *handle) const override;
    nixl_status_t getPublicData(const nixlBackendMD *memory, std::string &out) const override;
    nixl_status_t getConnInfo(std::string &out) const override;
    nixl_status_t loadRemoteConnInfo(const std::string &name, const std::string &conn_info) override;
    nixl_status_t loadRemoteMD(const nixlBlobDesc &memory,
                               const nixl_mem_t &kind,
                               const std::string &name,
                               nixlBackendMD *&out) override;
    nixl_status_t loadLocalMD(nixlBackendMD *memory, nixlBackendMD *&out) override;
    nixl_status_t getNotifs(notif_list_t &notifications) override;
    nixl_status_t genNotif(const std::string &name, const std::string &message) const override;
};

// The supported kinds of memory.
inline const nixl_mem_list_t MEMORIES = {DRAM_SEG, VRAM_SEG};

// The parameters that NIXL lists: names of settings in lower case, without PEERWAY_. The backend
// also accepts every other setting of docs/configuration.md.
inline constexpr const char *PARAMETERS[] = {
    "transport", "bind",    "advertise",       "interfaces", "lanes",        "shards",
    "deadline",  "detect",  "connect_timeout", "fence",      "notify_bytes", "log_level",
};
