// The binary interface between NIXL's core and a backend, for NIXL 1.3 to 1.5: the values of its
// enums, the layouts of its arguments, and the order of the virtual functions. NIXL's wheels
// contain no headers, so this file states these facts. `cargo xtask test --only nixl` compares the
// virtual functions with those of the backends in the wheels, and runs the plugin in each wheel.
//
// Classes have NIXL's names, because the test compares mangled names.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };

enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };

enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_INVALID_PARAM = -2,
    NIXL_ERR_BACKEND = -3,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_MISMATCH = -5,
    NIXL_ERR_NOT_ALLOWED = -6,
    NIXL_ERR_REPOST_ACTIVE = -7,
    NIXL_ERR_UNKNOWN = -8,
    NIXL_ERR_NOT_SUPPORTED = -9,
    NIXL_ERR_REMOTE_DISCONNECT = -10,
    NIXL_ERR_CANCELED = -11,
};

enum class nixl_thread_sync_t { none, strict, rw };
enum class nixl_cost_t { analytical_backend };

using nixl_b_params_t = std::unordered_map<std::string, std::string>;
using nixl_mem_list_t = std::vector<nixl_mem_t>;
using nixl_query_resp_t = std::optional<nixl_b_params_t>;
// Pairs of the sender's name and the message.
using notif_list_t = std::vector<std::pair<std::string, std::string>>;
using nixlMemViewH = void *;

// An entry of a descriptor list.
class nixlBasicDesc {
  public:
    uintptr_t addr;
    size_t len;
    uint64_t devId;
};

// Memory to register, or a peer's memory with the metadata of its backend.
class nixlBlobDesc : public nixlBasicDesc {
  public:
    std::string metaInfo;
};

// A backend's metadata of memory.
class nixlBackendMD {
  protected:
    bool isPrivateMD;

  public:
    explicit nixlBackendMD(bool is_private) : isPrivateMD(is_private) {}
    virtual ~nixlBackendMD() = default;
};

// Memory to transfer, with the backend's metadata of its registration.
class nixlMetaDesc : public nixlBasicDesc {
  public:
    nixlBackendMD *metadataP;
};

struct nixlRemoteMetaDesc;

// NIXL creates these lists. A backend only receives them.
template <class T> class nixlDescList {
  protected:
    nixl_mem_t type;
    std::vector<T> descs;

  public:
    virtual ~nixlDescList() = default;
    nixl_mem_t getType() const { return type; }
    size_t count() const { return descs.size(); }
    const T &operator[](size_t index) const { return descs[index]; }
};

using nixl_meta_dlist_t = nixlDescList<nixlMetaDesc>;
using nixl_reg_dlist_t = nixlDescList<nixlBlobDesc>;
using nixl_remote_meta_dlist_t = nixlDescList<nixlRemoteMetaDesc>;

// The base of a backend's request.
class nixlBackendReqH {
  public:
    virtual ~nixlBackendReqH() = default;
};

// NIXL's Python bindings raise this exception if a request is still active. They also recognise it
// by name and base when a backend throws it.
class __attribute__((visibility("default"))) nixlRepostActiveError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Options of a post.
struct nixlBackendOptionalArgs {
    std::string notifMsg;
    bool hasNotif = false;
    std::string customParam;
};

struct nixlAgentOptionalArgs;

// The parameters of a backend's constructor.
class nixlBackendInitParams {
  public:
    std::string localAgent;
    std::string type;
    nixl_b_params_t *customParams = nullptr;
    bool enableProgTh = false;
    uint64_t pthrDelay = 0;
    nixl_thread_sync_t syncMode = nixl_thread_sync_t::none;
    bool enableTelemetry_ = false;
};

// The layout differs between versions. This plugin creates none.
struct nixlTelemetryEvent {
    uint64_t unknown;
};

// The base of every backend. NIXL's own code reads the members, so their layout must match.
class nixlBackendEngine {
    std::string backendType;
    nixl_b_params_t customParams;
    std::vector<nixlTelemetryEvent> telemetryEvents_;
    std::mutex telemetryEventsMutex_;

  protected:
    bool initErr = false;
    const std::string localAgent;
    const bool enableTelemetry_;

  public:
    explicit nixlBackendEngine(const nixlBackendInitParams *init)
        : backendType(init->type), customParams(*init->customParams), localAgent(init->localAgent),
          enableTelemetry_(init->enableTelemetry_) {}
    nixlBackendEngine(const nixlBackendEngine &) = delete;
    void operator=(const nixlBackendEngine &) = delete;
    virtual ~nixlBackendEngine() = default;

    virtual bool supportsRemote() const = 0;
    virtual bool supportsLocal() const = 0;
    virtual bool supportsNotif() const = 0;
    virtual nixl_mem_list_t getSupportedMems() const = 0;
    virtual nixl_status_t registerMem(const nixlBlobDesc &, const nixl_mem_t &, nixlBackendMD *&) = 0;
    virtual nixl_status_t deregisterMem(nixlBackendMD *) = 0;
    virtual nixl_status_t connect(const std::string &) = 0;
    virtual nixl_status_t disconnect(const std::string &) = 0;
    virtual nixl_status_t unloadMD(nixlBackendMD *) = 0;
    virtual nixl_status_t prepXfer(const nixl_xfer_op_t &,
                                   const nixl_meta_dlist_t &,
                                   const nixl_meta_dlist_t &,
                                   const std::string &,
                                   nixlBackendReqH *&,
                                   const nixlBackendOptionalArgs *) const = 0;
    virtual nixl_status_t postXfer(const nixl_xfer_op_t &,
                                   const nixl_meta_dlist_t &,
                                   const nixl_meta_dlist_t &,
                                   const std::string &,
                                   nixlBackendReqH *&,
                                   const nixlBackendOptionalArgs *) const = 0;
    virtual nixl_status_t checkXfer(nixlBackendReqH *) const = 0;
    virtual nixl_status_t releaseReqH(nixlBackendReqH *) const = 0;
    virtual nixl_status_t
    prepMemView(const nixl_remote_meta_dlist_t &, nixlMemViewH &, const nixlBackendOptionalArgs *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t
    prepMemView(const nixl_meta_dlist_t &, nixlMemViewH &, const nixlBackendOptionalArgs *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual void releaseMemView(nixlMemViewH) const {}
    virtual nixl_status_t getPublicData(const nixlBackendMD *, std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getConnInfo(std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t loadRemoteConnInfo(const std::string &, const std::string &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t
    loadRemoteMD(const nixlBlobDesc &, const nixl_mem_t &, const std::string &, nixlBackendMD *&) {
        return NIXL_ERR_BACKEND;
    }
    virtual nixl_status_t loadLocalMD(nixlBackendMD *, nixlBackendMD *&) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t getNotifs(notif_list_t &) { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t genNotif(const std::string &, const std::string &) const { return NIXL_ERR_BACKEND; }
    virtual nixl_status_t queryMem(const nixl_reg_dlist_t &, std::vector<nixl_query_resp_t> &) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
    virtual nixl_status_t estimateXferCost(const nixl_xfer_op_t &,
                                           const nixl_meta_dlist_t &,
                                           const nixl_meta_dlist_t &,
                                           const std::string &,
                                           nixlBackendReqH *const &,
                                           std::chrono::microseconds &,
                                           std::chrono::microseconds &,
                                           nixl_cost_t &,
                                           const nixlAgentOptionalArgs *) const {
        return NIXL_ERR_NOT_SUPPORTED;
    }
};

// The table that a plugin returns to NIXL.
class nixlBackendPlugin {
  public:
    int api_version;
    nixlBackendEngine *(*create_engine)(const nixlBackendInitParams *);
    void (*destroy_engine)(nixlBackendEngine *);
    const char *(*get_plugin_name)();
    const char *(*get_plugin_version)();
    nixl_b_params_t (*get_backend_options)();
    nixl_mem_list_t (*get_backend_mems)();
};

constexpr int nixl_plugin_api_version = 1;

// The layouts of the standard library that the wheels use, and of the structs above.
static_assert(sizeof(void *) == 8 && sizeof(std::string) == 32 && sizeof(std::vector<int>) == 24);
static_assert(sizeof(nixl_b_params_t) == 56 && sizeof(std::mutex) == 40);
static_assert(sizeof(nixlBasicDesc) == 24 && offsetof(nixlBasicDesc, devId) == 16);
static_assert(sizeof(nixlBlobDesc) == 56 && sizeof(nixlMetaDesc) == 32);
static_assert(sizeof(nixl_meta_dlist_t) == 40 && sizeof(nixlBackendMD) == 16 && sizeof(nixlBackendReqH) == 8);
static_assert(sizeof(nixlBackendOptionalArgs) == 72 && offsetof(nixlBackendOptionalArgs, hasNotif) == 32);
static_assert(sizeof(nixlBackendInitParams) == 96 && offsetof(nixlBackendInitParams, customParams) == 64);
static_assert(offsetof(nixlBackendInitParams, pthrDelay) == 80 && offsetof(nixlBackendInitParams, enableTelemetry_) == 92);
static_assert(sizeof(nixlBackendEngine) == 8 + 32 + 56 + 24 + 40 + 8 + 32 + 8);
static_assert(sizeof(nixlBackendPlugin) == 56 && sizeof(nixl_status_t) == 4);
