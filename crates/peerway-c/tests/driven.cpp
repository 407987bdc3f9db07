// The host side of the GPU-driven engine. A CPU thread pushes the commands instead of a kernel,
// with the kernels' header compiled for the CPU.
//
// That header is included first here, and second in examples/cuda: both orders must work.
#include "peerway_device.cuh"

#include "check.h"

#include <cstdint>
#include <vector>

static const std::size_t BYTES = 1 << 20;

struct Side {
    peerway_proxy_host *proxy = nullptr;
    const peerway_proxy *kernel = nullptr;
    peerway_window window{};
    std::vector<unsigned char> info;
};

static Side side(const peerway_endpoint *endpoint, const peerway_region *region) {
    Side side;
    peerway_proxy_options options{};
    options.size = sizeof options;
    options.threads = 1, options.rings = 2, options.peers = 4, options.counters = 8;
    // A long time-out, because valgrind is slow.
    options.timeout_ns = 60 * SECOND;
    OK(peerway_proxy_new(endpoint, &options, &side.proxy));
    OK(peerway_proxy_handle(side.proxy, &side.kernel));
    OK(peerway_proxy_window(side.proxy, region, &side.window));
    std::size_t len = 0;
    SAYS(peerway_proxy_peer_info(side.proxy, nullptr, 0, &len), PEERWAY_STATUS_TOO_SMALL, "bytes");
    side.info.resize(len);
    OK(peerway_proxy_peer_info(side.proxy, side.info.data(), side.info.size(), &len));
    peerway_u32 rings = 0;
    OK(peerway_proxy_rings(side.proxy, &rings));
    TRUE(rings == 2 && side.kernel->rings == 2 && side.kernel->magic == PEERWAY_MAGIC && side.window.len == BYTES);
    return side;
}

static void puts_and_forwards(const char *transport) {
    peerway_endpoint_options options{};
    options.size = sizeof options;
    options.transport = transport;
    two pair = two_with(&options, BYTES);
    peerway_peer *back = nullptr;
    OK(peerway_endpoint_accept(pair.there, 120 * SECOND, &back));
    Side here = side(pair.here, pair.ours), there = side(pair.there, pair.theirs);
    std::size_t windows = 0;
    OK(peerway_proxy_add_peer(here.proxy, 0, pair.peer, there.info.data(), there.info.size(), &windows));
    TRUE(windows == 1);
    SAYS(peerway_proxy_add_peer(here.proxy, 0, pair.peer, there.info.data(), there.info.size(), nullptr), PEERWAY_STATUS_TAKEN, "peer 0");
    OK(peerway_proxy_add_peer(there.proxy, 3, back, here.info.data(), here.info.size(), nullptr));
    peerway_window theirs{};
    OK(peerway_proxy_peer_window(here.proxy, 0, 0, &theirs));
    SAYS(peerway_proxy_peer_window(here.proxy, 0, 1, &theirs), PEERWAY_STATUS_NOTHING, nullptr);
    OK(peerway_proxy_peer_window(here.proxy, 0, 0, &theirs));

    // The rule copies arrivals in the first half to the second half, raises a counter there, and
    // answers this side.
    peerway_place to{pair.theirs, BYTES / 2, 4096};
    uint16_t then = 5;
    peerway_answer answer{3, 2};
    peerway_forward rule{};
    rule.size = sizeof rule;
    rule.counter = 4;
    rule.from = {pair.theirs, 0, 4096};
    rule.to = &to, rule.to_count = 1;
    rule.then = &then, rule.then_count = 1;
    rule.answers = &answer, rule.answer_count = 1;
    OK(peerway_proxy_forward(there.proxy, &rule));
    SAYS(peerway_proxy_forward(there.proxy, &rule), PEERWAY_STATUS_BAD_RULE, "has a rule already");
    OK(peerway_proxy_arm(here.proxy));
    OK(peerway_proxy_arm(there.proxy));

    for (unsigned round = 1; round <= 20; round++) {
        OK(peerway_region_fill(pair.ours, 0, 4096, static_cast<uint8_t>(round)));
        // The kernel's part.
        TRUE(peerway_put_with_count(here.kernel, round % 2, 0, theirs.base, here.window.base, 4096, 4) == PEERWAY_OK);
        TRUE(peerway_wait_counter(here.kernel, 2, round, 0) == PEERWAY_OK);
        // The result on the other side.
        uint64_t value = 0;
        OK(peerway_proxy_wait_counter(there.proxy, 5, round, 120 * SECOND, &value));
        TRUE(value == round);
        unsigned char bytes[4096];
        OK(peerway_region_copy_out(pair.theirs, BYTES / 2, bytes, sizeof bytes));
        TRUE(bytes[0] == round && bytes[4095] == round);
    }
    TRUE(peerway_quiet(here.kernel, 0, 0) == PEERWAY_OK && peerway_quiet(here.kernel, 1, 0) == PEERWAY_OK);
    OK(peerway_proxy_stop_forwarding(there.proxy, 4));

    // An invalid command fails alone, and the fault names it.
    TRUE(peerway_put(here.kernel, 1, 0, theirs.base + BYTES, here.window.base, 4096) == PEERWAY_OK);
    TRUE(peerway_quiet(here.kernel, 1, 0) == PEERWAY_FAILED);
    peerway_proxy_fault fault{};
    fault.size = sizeof fault;
    OK(peerway_proxy_take_fault(here.proxy, &fault));
    TRUE(fault.code == PEERWAY_FAULT_DESTINATION && fault.peer == 0 && fault.ring == 1 && fault.op == PEERWAY_OP_PUT);
    SAYS(peerway_proxy_take_fault(here.proxy, &fault), PEERWAY_STATUS_NOTHING, nullptr);
    TRUE(peerway_put(here.kernel, 1, 0, theirs.base, here.window.base, 4096) == PEERWAY_OK);
    TRUE(peerway_quiet(here.kernel, 1, 0) == PEERWAY_OK);

    peerway_proxy_stats stats{};
    stats.size = sizeof stats;
    OK(peerway_proxy_statistics(here.proxy, &stats));
    TRUE(stats.puts == 21 && stats.bytes == 21 * 4096 && stats.counts == 20 && stats.faults == 1 && stats.commands >= 25);
    uint64_t counter = 0;
    OK(peerway_proxy_counter(there.proxy, 4, &counter));
    TRUE(counter == 20 && peerway_counter(there.kernel, 4) == 20);
    OK(peerway_proxy_disarm(here.proxy));
    OK(peerway_proxy_free(here.proxy));
    // This proxy is still armed. Freeing it also disarms it.
    OK(peerway_proxy_free(there.proxy));
    OK(peerway_peer_free(back));
    free_two(&pair);
}

int main() {
    puts_and_forwards("auto");
    puts_and_forwards("tcp");
    puts("driven: every command was carried out or reported as a fault");
    return 0;
}
