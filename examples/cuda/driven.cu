// A kernel that sends by itself: the host creates a proxy, and the kernel writes commands into its
// rings.
//
// Two endpoints of one process stand for two hosts. The kernel `send` puts tokens into the memory
// of the second endpoint and counts them there. The kernel `receive`, on the other side, waits for
// the count and compares the tokens.
//
//   nvcc -std=c++17 -arch=sm_90 driven.cu $(pkg-config --cflags --libs peerway) -o driven
//   ./driven
#include <peerway.h>

#include <peerway_device.cuh>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <cuda_runtime.h>

namespace {

constexpr unsigned TOKENS = 64, TOKEN_BYTES = 7168, COUNTER = 3, PEER = 0;
constexpr std::size_t BYTES = TOKENS * TOKEN_BYTES;
constexpr std::uint64_t SECOND = 1000000000;

void must(peerway_status status, const char *what) {
    if (status == PEERWAY_STATUS_OK) return;
    std::fprintf(stderr, "%s: %s: %s\n", what, peerway_status_name(status), peerway_last_error());
    std::exit(1);
}
#define MUST(call) must((call), #call)

void must(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}

// One warp per token. All its lanes write the token, and one lane sends it.
__global__ void send(const peerway_proxy *proxy, unsigned char *tokens, peerway_u64 src, peerway_u64 dst, int *status) {
    unsigned token = blockIdx.x;
    for (unsigned at = threadIdx.x; at < TOKEN_BYTES; at += 32) tokens[token * TOKEN_BYTES + at] = static_cast<unsigned char>(token + at);
    // Each lane has one command or none. The put includes the stores of all lanes.
    peerway_u64 offset = static_cast<peerway_u64>(token) * TOKEN_BYTES;
    int pushed = peerway_put_with_count_warp(proxy, peerway_ring_for_warp(proxy), PEER, dst + offset, src + offset, TOKEN_BYTES, COUNTER,
                                             threadIdx.x == 0);
    if (pushed != PEERWAY_OK) *status = pushed;
}

// Waits for all tokens, from any peer, and compares them.
__global__ void receive(const peerway_proxy *proxy, const unsigned char *tokens, int *status) {
    __shared__ int came;
    if (threadIdx.x == 0) came = peerway_wait_counter(proxy, COUNTER, TOKENS, PEERWAY_ANY_PEER);
    __syncthreads();
    if (came != PEERWAY_OK) {
        if (threadIdx.x == 0) *status = came;
        return;
    }
    for (unsigned at = threadIdx.x; at < TOKENS * TOKEN_BYTES; at += blockDim.x) {
        if (tokens[at] != static_cast<unsigned char>(at / TOKEN_BYTES + at % TOKEN_BYTES)) *status = -1;
    }
}

template <typename T>
T sized() {
    T value{};
    value.size = sizeof value;
    return value;
}

struct Side {
    peerway_endpoint *endpoint = nullptr;
    peerway_region *region = nullptr;
    peerway_proxy_host *proxy = nullptr;
    const peerway_proxy *kernel = nullptr; // the argument for kernels
    peerway_window window{};
    unsigned char *memory = nullptr;
};

Side make_side() {
    Side side;
    MUST(peerway_endpoint_new(nullptr, &side.endpoint));
    MUST(peerway_region_allocate_gpu(side.endpoint, 0, BYTES, &side.region));
    auto facts = sized<peerway_region_facts>();
    MUST(peerway_region_describe(side.region, &facts));
    side.memory = reinterpret_cast<unsigned char *>(facts.address);
    auto options = sized<peerway_proxy_options>();
    options.on_gpu = 1;
    MUST(peerway_proxy_new(side.endpoint, &options, &side.proxy));
    MUST(peerway_proxy_window(side.proxy, side.region, &side.window));
    MUST(peerway_proxy_handle(side.proxy, &side.kernel));
    return side;
}

void free_side(Side &side) {
    MUST(peerway_proxy_free(side.proxy));
    MUST(peerway_region_free(side.region));
    MUST(peerway_endpoint_free(side.endpoint));
}

} // namespace

int main() {
    must(cudaSetDevice(0), "cudaSetDevice");
    Side sender = make_side(), receiver = make_side();

    // The receiver passes on its metadata and its peer info. To another host, send them by any
    // means.
    std::vector<unsigned char> metadata(4096), info(65536);
    std::size_t metadata_len = 0, info_len = 0;
    MUST(peerway_endpoint_metadata(receiver.endpoint, metadata.data(), metadata.size(), &metadata_len));
    MUST(peerway_proxy_peer_info(receiver.proxy, info.data(), info.size(), &info_len));
    peerway_peer *peer = nullptr;
    MUST(peerway_endpoint_connect(sender.endpoint, metadata.data(), metadata_len, 0, &peer));
    MUST(peerway_proxy_add_peer(sender.proxy, PEER, peer, info.data(), info_len, nullptr));
    peerway_window theirs{};
    MUST(peerway_proxy_peer_window(sender.proxy, PEER, 0, &theirs));

    // CUDA loads a kernel's code on first use, and the load waits for running kernels. So if a
    // kernel waits for another one, the code of both must be loaded before the first launch.
    cudaFuncAttributes loaded;
    must(cudaFuncGetAttributes(&loaded, send), "cudaFuncGetAttributes");
    must(cudaFuncGetAttributes(&loaded, receive), "cudaFuncGetAttributes");

    // Arm the proxy before the kernels are launched, and disarm it after they have ended.
    int *status = nullptr;
    must(cudaMallocManaged(&status, sizeof *status), "cudaMallocManaged");
    *status = PEERWAY_OK;
    MUST(peerway_proxy_arm(sender.proxy));
    // Non-blocking streams, because one kernel waits for the bytes that the other sends.
    cudaStream_t sending, receiving;
    must(cudaStreamCreateWithFlags(&sending, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    must(cudaStreamCreateWithFlags(&receiving, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    receive<<<1, 256, 0, receiving>>>(receiver.kernel, receiver.memory, status);
    send<<<TOKENS, 32, 0, sending>>>(sender.kernel, sender.memory, sender.window.base, theirs.base, status);
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    MUST(peerway_proxy_disarm(sender.proxy));

    std::uint64_t arrived = 0;
    MUST(peerway_proxy_wait_counter(receiver.proxy, COUNTER, TOKENS, 10 * SECOND, &arrived));
    auto fault = sized<peerway_proxy_fault>();
    if (peerway_proxy_take_fault(sender.proxy, &fault) == PEERWAY_STATUS_OK) {
        char text[128];
        std::size_t len = 0;
        MUST(peerway_fault_text(fault.code, text, sizeof text, &len));
        std::fprintf(stderr, "command %llu of ring %u: %s\n", static_cast<unsigned long long>(fault.position), fault.ring, text);
        return 1;
    }
    std::printf("%u tokens of %u bytes, %llu counted, status of the kernels %d\n", TOKENS, TOKEN_BYTES, static_cast<unsigned long long>(arrived),
                *status);
    int failed = *status != PEERWAY_OK;
    cudaStreamDestroy(sending);
    cudaStreamDestroy(receiving);
    cudaFree(status);
    MUST(peerway_peer_free(peer));
    free_side(sender);
    free_side(receiver);
    return failed;
}
