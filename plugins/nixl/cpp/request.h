// A request. It is prepared once and posted many times.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "handle.h"
#include "nixl_abi.h"
#include "remote_agent.h"

class Request : public nixlBackendReqH {
    const std::string agent;
    const std::string about;
    std::shared_ptr<Peer> peer;
    Prepared prepared;

    std::mutex changing;
    Transfer transfer;
    // The last result of post() or check(). While it is NIXL_IN_PROG, NIXL respects the result of
    // releaseReqH. Otherwise NIXL calls releaseReqH from a destructor.
    nixl_status_t told = NIXL_ERR_NOT_POSTED;
    // Whether the failure and the open fence of the current post have been logged. Each is logged
    // once.
    bool said_end = false;
    bool said_open = false;
    // The owner revoked the memory. From then on, `transfer` only tests whether the owner still
    // lives.
    bool taken_back = false;
    // NIXL releases the request, so it does not matter whether the agent still lives.
    bool given_up = false;

    nixl_status_t answer(peerway_status status);

  public:
    Request(std::string our_agent, const std::string &remote_agent)
        : agent(std::move(our_agent)), about("transfer with agent '" + remote_agent + "'") {}

    // Prepares the request.
    nixl_status_t prepare(const std::shared_ptr<Peer> &to, const Batch &batch);
    // Posts the request. If `notification` is not null, it follows the bytes.
    nixl_status_t post(const std::string *notification);
    // Polls the request and returns its state.
    nixl_status_t check();
    // Cancels the request if it is in flight, and waits for its end, at most for the fence
    // deadline. Returns true if the request can be deleted. Throws nixlRepostActiveError if its
    // bytes may still land. Returns false if its bytes may still land and NIXL ignores the result:
    // the request must be kept.
    bool stop();
};
