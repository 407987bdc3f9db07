// GPU memory and CUDA streams, with the driver that PEERWAY_CUDA_SO names. The tests use a stand-in
// driver, which needs no GPU.
#define _GNU_SOURCE
#include <dlfcn.h>

#include "check.h"

#define BYTES 65536

// The driver functions that a stream needs.
static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*create)(void **, unsigned);
    int (*synchronize)(void *);
    int (*destroy)(void *);
} cuda;

static void *symbol(void *library, const char *name) {
    void *found = dlsym(library, name);
    TRUE(found != NULL);
    return found;
}

static void *stream(void) {
    const char *name = getenv("PEERWAY_CUDA_SO");
    TRUE(name != NULL);
    void *library = dlopen(name, RTLD_NOW), *context, *stream;
    TRUE(library != NULL);
    *(void **)&cuda.init = symbol(library, "cuInit");
    *(void **)&cuda.retain = symbol(library, "cuDevicePrimaryCtxRetain");
    *(void **)&cuda.set_current = symbol(library, "cuCtxSetCurrent");
    *(void **)&cuda.create = symbol(library, "cuStreamCreate");
    *(void **)&cuda.synchronize = symbol(library, "cuStreamSynchronize");
    *(void **)&cuda.destroy = symbol(library, "cuStreamDestroy_v2");
    TRUE(cuda.init(0) == 0 && cuda.retain(&context, 0) == 0 && cuda.set_current(context) == 0 && cuda.create(&stream, 1) == 0);
    return stream;
}

static unsigned char byte_of(const struct peerway_region *region, uint64_t offset) {
    unsigned char byte;
    OK(peerway_region_copy_out(region, offset, &byte, 1));
    return byte;
}

int main(void) {
    struct two two;
    void *ours = stream();
    OK(peerway_endpoint_new(NULL, &two.here));
    OK(peerway_endpoint_new(NULL, &two.there));
    OK(peerway_gpu_warm_up(0));
    SAYS(peerway_gpu_warm_up(99), PEERWAY_STATUS_NO_SUCH_GPU, "there is no GPU 99");
    SAYS(peerway_region_allocate_gpu(two.here, 99, BYTES, &two.ours), PEERWAY_STATUS_NO_SUCH_GPU, "there is no GPU 99");
    OK(peerway_region_allocate_gpu(two.here, 0, BYTES, &two.ours));
    OK(peerway_region_allocate_gpu(two.there, 0, BYTES, &two.theirs));
    two.peer = connect_to(two.here, two.there);
    two.remote = import(two.peer, two.theirs, PEERWAY_ACCESS_READ_WRITE);

    // A part of an allocation is registered by its address. Memory of the host is refused.
    struct peerway_region_facts facts = {.size = sizeof facts};
    OK(peerway_region_describe(two.ours, &facts));
    TRUE(facts.on_gpu == 1 && facts.gpu == 0 && facts.len == BYTES);
    struct peerway_region *part;
    OK(peerway_region_register_gpu(two.here, facts.address + 4096, 4096, &part));
    OK(peerway_region_fill(part, 0, 4096, 9));
    TRUE(byte_of(two.ours, 4096) == 9 && byte_of(two.ours, 0) == 0);
    OK(peerway_region_free(part));
    SAYS(peerway_region_register_gpu(two.here, (uintptr_t)&facts, 8, &part), PEERWAY_STATUS_GPU, "is not memory of a GPU");

    OK(peerway_peer_write(two.peer, two.ours, 0, two.remote, 0, BYTES));
    TRUE(byte_of(two.theirs, 5000) == 9);

    // Transfers in a stream, several times.
    struct peerway_batch *batch;
    struct peerway_prepared *prepared;
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, two.ours, 0, two.remote, 0, BYTES, NULL, &batch));
    OK(peerway_peer_prepare(two.peer, batch, &prepared));
    for (int round = 1; round <= 3; round++) {
        struct peerway_enqueued *enqueued;
        struct peerway_end ended = {.size = sizeof ended};
        uint64_t runs = 0;
        OK(peerway_region_fill(two.ours, 0, BYTES, (uint8_t)(20 + round)));
        OK(peerway_prepared_enqueue(prepared, ours, &enqueued));
        TRUE(cuda.synchronize(ours) == 0);
        OK(peerway_enqueued_wait(enqueued, 120 * SECOND, &ended));
        OK(peerway_enqueued_runs(enqueued, &runs));
        TRUE(runs == 1 && ended.status == PEERWAY_STATUS_OK && byte_of(two.theirs, BYTES - 1) == 20 + round);
        OK(round == 1 ? peerway_enqueued_release(enqueued) : peerway_enqueued_free(enqueued));
    }

    // A stage that a stream releases.
    struct peerway_staged *staged;
    const struct peerway_batch *stages[1] = {batch};
    OK(peerway_peer_stage(two.peer, stages, 1, &staged));
    OK(peerway_region_fill(two.ours, 0, BYTES, 33));
    OK(peerway_staged_release_in(staged, 0, ours));
    OK(peerway_staged_wait(staged, 120 * SECOND, NULL));
    TRUE(byte_of(two.theirs, 1) == 33);
    OK(peerway_staged_free(staged));

    // Rings for kernels.
    struct peerway_proxy_options options = {.size = sizeof options, .on_gpu = 1, .threads = 1, .rings = 2};
    struct peerway_proxy_host *proxy;
    const struct peerway_proxy *kernel;
    struct peerway_window window;
    OK(peerway_proxy_new(two.here, &options, &proxy));
    OK(peerway_proxy_window(proxy, two.ours, &window));
    OK(peerway_proxy_handle(proxy, &kernel));
    TRUE(window.len == BYTES && kernel != NULL);
    OK(peerway_proxy_free(proxy));

    OK(peerway_prepared_free(prepared));
    OK(peerway_batch_free(batch));
    free_two(&two);
    TRUE(cuda.destroy(ours) == 0);
    puts("gpu: memory and streams work");
    return 0;
}
