#include "transfers.hpp"

#include <sched.h>

#include "handles.hpp"
#include "log.hpp"

namespace shim {

static const char *const CALL = "uccl_engine_xfer_status";

uint64_t Transfers::add(Transfer transfer) {
    const uint64_t number = fresh_number();
    std::unique_lock lock(lock_);
    under_way_.emplace(number, std::move(transfer));
    return number;
}

bool Transfers::has_ended(uint64_t number) {
    // Another thread may free the handle during the poll. libpeerway then refuses the number, and
    // that thread has reported the end.
    const peerway_transfer *transfer = nullptr;
    {
        std::unique_lock lock(lock_);
        const auto found = under_way_.find(number);
        if (found != under_way_.end()) transfer = found->second.get();
    }
    const auto status = transfer ? peerway_transfer_poll(transfer, nullptr) : PEERWAY_STATUS_BAD_HANDLE;
    if (status == PEERWAY_STATUS_PENDING) {
        // Callers poll in a loop. On a machine with few cores, the transfer may need this core.
        sched_yield();
        return false;
    }
    std::unique_lock lock(lock_);
    if (under_way_.erase(number) == 0) {
        // "Ended" keeps a caller with a wrong number from polling forever.
        complain(CALL, "there is no transfer " + std::to_string(number) + ", or its end has been reported");
    } else if (status != PEERWAY_STATUS_OK) {
        complain(CALL, "transfer " + std::to_string(number) + " failed: " + peerway_last_error());
        told_of_failure_.insert(std::this_thread::get_id());
    }
    return true;
}

bool Transfers::take_failure() {
    std::unique_lock lock(lock_);
    return told_of_failure_.erase(std::this_thread::get_id()) != 0;
}

void Transfers::look() {
    std::unique_lock lock(lock_);
    for (const auto &[number, transfer] : under_way_) peerway_transfer_poll(transfer.get(), nullptr);
}

} // namespace shim
