// Several threads use one handle, an event loop takes completions, and handles are freed during
// calls.
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "check.h"

#define THREADS 2
#define ROUNDS 200
#define BLOCK 4096

static struct two two;
static struct peerway_completions *completions;

// Posts to its own part of the memory, watches each transfer by token, and checks its own errors.
static void *poster(void *argument) {
    uint64_t me = *(const uint64_t *)argument;
    TRUE(strcmp(peerway_last_error(), "") == 0);
    struct peerway_batch *batch;
    struct peerway_batch_options options = {.size = sizeof options, .counts = 1, .counter = (uint32_t)me};
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, two.ours, me * BLOCK, two.remote, me * BLOCK, BLOCK, &options, &batch));
    for (uint64_t round = 0; round < ROUNDS; round++) {
        struct peerway_transfer *transfer;
        OK(peerway_peer_post(two.peer, batch, &transfer));
        OK(peerway_completions_watch(completions, transfer, me << 32 | round));
        // The completion arrives although the handle is freed.
        OK(peerway_transfer_free(transfer));
        if (me == 0) SAYS(peerway_batch_total(NULL, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "bytes is null");
        else SAYS(peerway_region_fill(two.ours, 1, UINT64_MAX, 0), PEERWAY_STATUS_OUTSIDE, "extends beyond");
    }
    OK(peerway_batch_free(batch));
    return NULL;
}

static void posts_from_two_threads(const char *transport) {
    struct peerway_endpoint_options options = {.size = sizeof options, .transport = transport};
    two = two_with(&options, THREADS * BLOCK);
    OK(peerway_completions_new(&completions));
    int fd = -1;
    OK(peerway_completions_fd(completions, &fd));
    pthread_t threads[THREADS];
    uint64_t numbers[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        numbers[i] = i;
        TRUE(pthread_create(&threads[i], NULL, poster, &numbers[i]) == 0);
    }
    static unsigned char seen[THREADS][ROUNDS];
    memset(seen, 0, sizeof seen);
    for (size_t all = 0; all < THREADS * ROUNDS;) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        TRUE(poll(&ready, 1, 60000) == 1);
        uint64_t tokens[7];
        size_t count = 0;
        OK(peerway_completions_take(completions, tokens, 7, &count));
        for (size_t i = 0; i < count; i++) TRUE(!seen[tokens[i] >> 32][(uint32_t)tokens[i]]++);
        all += count;
    }
    for (uint64_t i = 0; i < THREADS; i++) {
        TRUE(pthread_join(threads[i], NULL) == 0);
        uint64_t arrived = 0;
        OK(peerway_endpoint_wait_counter(two.there, (uint32_t)i, ROUNDS, 120 * SECOND, &arrived));
        TRUE(arrived == ROUNDS);
        OK(peerway_endpoint_reset_counter(two.there, (uint32_t)i, &arrived));
        TRUE(arrived == ROUNDS);
    }
    // The queue is empty, and no token comes twice. The descriptor may be readable once more if a
    // token was taken while it was being signalled.
    struct pollfd quiet = {.fd = fd, .events = POLLIN};
    for (int looks = 0;; looks++) {
        uint64_t token;
        size_t count = 9;
        OK(peerway_completions_take(completions, &token, 1, &count));
        TRUE(count == 0 && looks < 4);
        if (poll(&quiet, 1, 20) == 0) break;
    }
    OK(peerway_completions_free(completions));
    free_two(&two);
}

static void *acceptor(void *argument) {
    struct peerway_peer *peer;
    enum peerway_status status = peerway_endpoint_accept(argument, PEERWAY_FOREVER, &peer);
    // The endpoint is freed before the call finds it, or during the call.
    TRUE(status == PEERWAY_STATUS_ENDPOINT_CLOSED || status == PEERWAY_STATUS_BAD_HANDLE);
    return NULL;
}

static void freed_under_a_call(void) {
    for (int round = 0; round < 5; round++) {
        struct peerway_endpoint *endpoint;
        OK(peerway_endpoint_new(NULL, &endpoint));
        pthread_t thread;
        TRUE(pthread_create(&thread, NULL, acceptor, endpoint) == 0);
        usleep(10000);
        OK(peerway_endpoint_free(endpoint));
        TRUE(pthread_join(thread, NULL) == 0);
    }
}

static atomic_int freed;

static void *frees(void *argument) {
    if (peerway_region_free(argument) == PEERWAY_STATUS_OK) freed++;
    return NULL;
}

// If two threads free a handle, only one of them succeeds.
static void freed_by_two(void) {
    struct peerway_endpoint *endpoint;
    OK(peerway_endpoint_new(NULL, &endpoint));
    for (int round = 1; round <= 50; round++) {
        struct peerway_region *region;
        pthread_t threads[2];
        OK(peerway_region_allocate(endpoint, 4096, &region));
        for (int i = 0; i < 2; i++) TRUE(pthread_create(&threads[i], NULL, frees, region) == 0);
        for (int i = 0; i < 2; i++) TRUE(pthread_join(threads[i], NULL) == 0);
        TRUE(freed == round);
    }
    OK(peerway_endpoint_free(endpoint));
}

int main(void) {
    posts_from_two_threads("auto");
    posts_from_two_threads("tcp");
    freed_under_a_call();
    freed_by_two();
    puts("threads: every transfer and call ended");
    return 0;
}
