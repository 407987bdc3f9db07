// The transfers of a connection by number, and the threads that a failure was reported to.
#pragma once

#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "owned.hpp"

namespace shim {

class Transfers {
  public:
    // Assigns a number to a posted transfer.
    uint64_t add(Transfer transfer);

    // Whether a transfer has ended. An ended transfer is removed. A failure is logged, and recorded
    // for this thread.
    bool has_ended(uint64_t number);

    // Whether a failure was recorded for this thread since its last call.
    bool take_failure();

    // Polls every transfer. An ended transfer occupies its slot until it is polled.
    void look();

  private:
    std::mutex lock_;
    std::unordered_map<uint64_t, Transfer> under_way_;
    std::unordered_set<std::thread::id> told_of_failure_;
};

} // namespace shim
