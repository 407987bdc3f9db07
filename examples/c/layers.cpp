// C++: handles that free themselves, failures as exceptions, and layers that are sent while the
// next one is computed.
//
//   c++ -std=c++17 layers.cpp $(pkg-config --cflags --libs peerway) -o layers && ./layers
#include <peerway.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

void must(peerway_status status) {
    if (status != PEERWAY_STATUS_OK) {
        throw std::runtime_error(std::string(peerway_status_name(status)) + ": " + peerway_last_error());
    }
}

// Owns a handle. The _free call is part of the type, so the owner is as large as a pointer.
template <auto Free>
struct Freed {
    template <typename T>
    void operator()(T *handle) const {
        Free(handle);
    }
};
template <typename T, auto Free>
using Owned = std::unique_ptr<T, Freed<Free>>;

using Endpoint = Owned<peerway_endpoint, peerway_endpoint_free>;
using Peer = Owned<peerway_peer, peerway_peer_free>;
using Region = Owned<peerway_region, peerway_region_free>;
using Remote = Owned<peerway_remote, peerway_remote_free>;
using Batch = Owned<peerway_batch, peerway_batch_free>;
using Staged = Owned<peerway_staged, peerway_staged_free>;

// make<Region>(peerway_region_allocate, endpoint, bytes): makes the call with the handle's address
// as its last argument.
template <typename Handle, typename Call, typename... Arguments>
Handle make(Call call, Arguments... arguments) {
    typename Handle::pointer made = nullptr;
    must(call(arguments..., &made));
    return Handle(made);
}

// A zeroed struct of the library with its size set.
template <typename T>
T sized() {
    T value{};
    value.size = sizeof value;
    return value;
}

constexpr std::size_t LAYERS = 8, BYTES = 64 << 10;
constexpr std::uint64_t SECOND = 1000000000;

void run() {
    Endpoint owner = make<Endpoint>(peerway_endpoint_new, nullptr);
    Endpoint sender = make<Endpoint>(peerway_endpoint_new, nullptr);
    Region theirs = make<Region>(peerway_region_allocate, owner.get(), LAYERS * BYTES);
    Region ours = make<Region>(peerway_region_allocate, sender.get(), LAYERS * BYTES);

    std::array<std::uint8_t, PEERWAY_DESCRIPTOR_LEN> descriptor{};
    must(peerway_region_advertise(theirs.get(), 0, UINT64_MAX, PEERWAY_ACCESS_WRITE, nullptr, descriptor.data()));
    std::size_t len = 0;
    if (peerway_endpoint_metadata(owner.get(), nullptr, 0, &len) != PEERWAY_STATUS_TOO_SMALL) throw std::runtime_error("expected TOO_SMALL with the length of the metadata");
    std::vector<std::uint8_t> metadata(len);
    must(peerway_endpoint_metadata(owner.get(), metadata.data(), metadata.size(), &len));

    Peer peer = make<Peer>(peerway_endpoint_connect, sender.get(), metadata.data(), metadata.size(), std::uint64_t{0});
    Remote remote = make<Remote>(peerway_peer_import, peer.get(), descriptor.data(), descriptor.size());

    // One batch per layer. Each has its own counter, which the receiver of the layer waits for.
    std::vector<Batch> layers;
    std::vector<const peerway_batch *> handles;
    for (std::size_t layer = 0; layer < LAYERS; layer++) {
        auto options = sized<peerway_batch_options>();
        options.counts = 1;
        options.counter = 100 + static_cast<std::uint32_t>(layer);
        layers.push_back(make<Batch>(peerway_batch_range, PEERWAY_DIRECTION_WRITE, ours.get(), layer * BYTES, remote.get(),
                                     layer * BYTES, BYTES, &options));
        handles.push_back(layers.back().get());
    }
    Staged staged = make<Staged>(peerway_peer_stage, peer.get(), handles.data(), handles.size());
    layers.clear();

    for (std::size_t layer = 0; layer < LAYERS; layer++) {
        must(peerway_region_fill(ours.get(), layer * BYTES, BYTES, static_cast<std::uint8_t>(layer + 1)));
        must(peerway_staged_release(staged.get(), layer));
    }
    for (std::size_t layer = LAYERS; layer-- > 0;) {
        must(peerway_endpoint_wait_counter(owner.get(), 100 + static_cast<std::uint32_t>(layer), 1, 30 * SECOND, nullptr));
        std::vector<std::uint8_t> bytes(BYTES);
        must(peerway_region_copy_out(theirs.get(), layer * BYTES, bytes.data(), bytes.size()));
        for (auto byte : bytes) {
            if (byte != layer + 1) throw std::runtime_error("layer " + std::to_string(layer) + " differs from the sent bytes");
        }
    }
    auto ended = sized<peerway_end>();
    must(peerway_staged_wait(staged.get(), 30 * SECOND, &ended));
    std::printf("%zu layers of %zu bytes, fence %s\n", LAYERS, BYTES, ended.fence_open ? "open" : "held");

    // A failure is an exception with the library's error message.
    try {
        make<Remote>(peerway_peer_import, peer.get(), descriptor.data(), descriptor.size() - 1);
        throw std::logic_error("a truncated descriptor was accepted");
    } catch (const std::runtime_error &refused) {
        std::printf("refused as expected: %s\n", refused.what());
    }
}

} // namespace

int main() {
    try {
        run();
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
