#include "handles.hpp"

#include <atomic>

namespace shim {

uint64_t fresh_number() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

} // namespace shim
