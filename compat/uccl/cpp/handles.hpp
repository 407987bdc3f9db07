// Handles: numbers instead of addresses, so that a destroyed handle is refused and not
// dereferenced.
//
// An object lives until its handle is destroyed and no call uses it any more.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace shim {

// A number that this process has not used before, starting with 1.
uint64_t fresh_number();

template <typename Thing> class Handles {
  public:
    // The table of the process. It is never destroyed, because threads may still be in calls at
    // exit.
    static Handles &all() {
        static Handles *const table = new Handles;
        return *table;
    }

    uintptr_t add(std::shared_ptr<Thing> thing) {
        const uintptr_t number = fresh_number();
        std::unique_lock lock(lock_);
        things_.emplace(number, std::move(thing));
        return number;
    }

    std::shared_ptr<Thing> get(const void *handle) const {
        std::shared_lock lock(lock_);
        const auto found = things_.find(reinterpret_cast<uintptr_t>(handle));
        return found == things_.end() ? nullptr : found->second;
    }

    // Removes and returns an object. Null if it does not exist any more.
    std::shared_ptr<Thing> remove(const void *handle) {
        std::unique_lock lock(lock_);
        const auto found = things_.extract(reinterpret_cast<uintptr_t>(handle));
        return found ? std::move(found.mapped()) : nullptr;
    }

    std::vector<std::shared_ptr<Thing>> every() const {
        std::shared_lock lock(lock_);
        std::vector<std::shared_ptr<Thing>> found;
        for (const auto &[number, thing] : things_) found.push_back(thing);
        return found;
    }

  private:
    mutable std::shared_mutex lock_;
    std::unordered_map<uintptr_t, std::shared_ptr<Thing>> things_;
};

} // namespace shim
