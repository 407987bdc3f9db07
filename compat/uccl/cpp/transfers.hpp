// The transfers of a connection by number, and whom a failed one was reported to.
#pragma once

#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "owned.hpp"

namespace shim {

class Transfers {
  public:
    // A number for a transfer that was posted.
    uint64_t add(Transfer transfer);

    // Whether it has ended. One that has is forgotten; one that failed is told, and remembered against this thread.
    bool has_ended(uint64_t number);

    // Whether this thread heard of a failure since it asked this last.
    bool take_failure();

    // Looks at every transfer: a place is kept for one that has ended until somebody does.
    void look();

  private:
    std::mutex lock_;
    std::unordered_map<uint64_t, Transfer> under_way_;
    std::unordered_set<std::thread::id> told_of_failure_;
};

} // namespace shim
