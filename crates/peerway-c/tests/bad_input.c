// Invalid arguments: the status and the error message of each.
#define _GNU_SOURCE
#include <assert.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define BYTES 65536

// The layouts of version 0.1. A program that was compiled with it must always work.
static_assert(sizeof(struct peerway_endpoint_options) == 128, "grown");
static_assert(offsetof(struct peerway_endpoint_options, settings) == 112, "the length of the first version");
static_assert(sizeof(struct peerway_setting) == 16, "must stay");
static_assert(sizeof(struct peerway_batch_options) == 48, "grown");
static_assert(sizeof(struct peerway_blocks) == 48, "grown");
static_assert(sizeof(struct peerway_pair) == 40, "must stay");
static_assert(sizeof(struct peerway_end) == 16, "grown");
static_assert(sizeof(struct peerway_region_facts) == 40, "grown");
static_assert(sizeof(struct peerway_remote_facts) == 32, "grown");
static_assert(sizeof(struct peerway_peer_facts) == 48, "grown");
static_assert(offsetof(struct peerway_peer_facts, data) == 40, "the length of the first version");
static_assert(sizeof(struct peerway_peer_stats) == 72, "grown");
static_assert(offsetof(struct peerway_peer_stats, corrupt_records) == 56, "the length of the first version");
static_assert(sizeof(struct peerway_endpoint_stats) == 72, "grown");
static_assert(sizeof(struct peerway_refusal_stats) == 104, "grown");
static_assert(offsetof(struct peerway_refusal_stats, corrupt_records) == 88, "the length of the first version");
static_assert(sizeof(struct peerway_transfer_stats) == 48, "grown");
static_assert(sizeof(struct peerway_proxy_options) == 48, "grown");
static_assert(sizeof(struct peerway_forward) == 88, "grown");
static_assert(sizeof(struct peerway_proxy_fault) == 32, "grown");
static_assert(sizeof(struct peerway_proxy_stats) == 56, "grown");
static_assert(sizeof(struct peerway_window) == 16 && sizeof(struct peerway_place) == 24 && sizeof(struct peerway_answer) == 4, "must stay");

static void null_and_stale_handles(void) {
    struct peerway_endpoint *endpoint;
    struct peerway_region *region = (struct peerway_region *)1;
    SAYS(peerway_endpoint_new(NULL, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "endpoint is null");
    OK(peerway_endpoint_new(NULL, &endpoint));
    SAYS(peerway_region_allocate(NULL, 64, &region), PEERWAY_STATUS_NULL_ARGUMENT, "the handle to an endpoint is null");
    TRUE(region == NULL);
    SAYS(peerway_region_allocate(endpoint, 64, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "region is null");
    OK(peerway_region_allocate(endpoint, 64, &region));

    // A handle of another kind.
    SAYS(peerway_endpoint_close((const struct peerway_endpoint *)(const void *)region), PEERWAY_STATUS_BAD_HANDLE,
         "not a handle to an endpoint");
    // A handle that is freed, freed twice, and used after new handles were made.
    struct peerway_region *freed = region, *others[100];
    OK(peerway_region_free(region));
    SAYS(peerway_region_free(freed), PEERWAY_STATUS_BAD_HANDLE, "was it freed already?");
    for (int i = 0; i < 100; i++) OK(peerway_region_allocate(endpoint, 64, &others[i]));
    SAYS(peerway_region_fill(freed, 0, 1, 1), PEERWAY_STATUS_BAD_HANDLE, "not a handle to a region");
    for (int i = 0; i < 100; i++) OK(peerway_region_free(others[i]));
    // A pointer that never was a handle.
    int on_the_stack = 0;
    SAYS(peerway_region_free((struct peerway_region *)(void *)&on_the_stack), PEERWAY_STATUS_BAD_HANDLE, "");
    SAYS(peerway_peer_remove((struct peerway_peer *)UINTPTR_MAX), PEERWAY_STATUS_BAD_HANDLE, "not a handle to a peer");
    // Freeing null has no effect.
    OK(peerway_region_free(NULL));
    OK(peerway_transfer_free(NULL));
    OK(peerway_proxy_free(NULL));
    OK(peerway_endpoint_free(endpoint));
    SAYS(peerway_endpoint_close(endpoint), PEERWAY_STATUS_BAD_HANDLE, "not a handle to an endpoint");
    TRUE(strcmp(peerway_status_name(PEERWAY_STATUS_BAD_HANDLE), "BAD_HANDLE") == 0);
    TRUE(strcmp(peerway_status_name(-5), "?") == 0 && strcmp(peerway_path_name(99), "?") == 0);
    TRUE(peerway_version() == (PEERWAY_VERSION_MAJOR << 16 | PEERWAY_VERSION_MINOR << 8 | PEERWAY_VERSION_PATCH));
}

static void sizes_of_structs(void) {
    struct {
        struct peerway_endpoint_options known;
        uint64_t later;
    } options;
    memset(&options, 0, sizeof options);
    struct peerway_endpoint *endpoint;
    SAYS(peerway_endpoint_new(&options.known, &endpoint), PEERWAY_STATUS_BAD_SIZE, "set it to sizeof(struct peerway_endpoint_options)");
    // The size of the first version, and a smaller one.
    const size_t first = offsetof(struct peerway_endpoint_options, settings);
    options.known.size = first;
    OK(peerway_endpoint_new(&options.known, &endpoint));
    OK(peerway_endpoint_free(endpoint));
    options.known.size = first - 1;
    SAYS(peerway_endpoint_new(&options.known, &endpoint), PEERWAY_STATUS_BAD_SIZE, "is given as 111");
    options.known.size = (size_t)-1;
    SAYS(peerway_endpoint_new(&options.known, &endpoint), PEERWAY_STATUS_BAD_SIZE, "peerway_endpoint_options");
    // A program that is newer than the library, with and without a field that the library does not
    // know.
    options.known.size = sizeof options;
    options.later = 1;
    SAYS(peerway_endpoint_new(&options.known, &endpoint), PEERWAY_STATUS_BAD_SIZE, "has fields set that this library does not know");
    options.later = 0;
    OK(peerway_endpoint_new(&options.known, &endpoint));
    OK(peerway_endpoint_free(endpoint));
    SAYS(peerway_endpoint_new((const struct peerway_endpoint_options *)((const char *)&options + 1), &endpoint),
         PEERWAY_STATUS_BAD_ARGUMENT, "not aligned");
    TRUE(endpoint == NULL);
}

static void settings(void) {
    struct peerway_endpoint *endpoint;
    struct peerway_endpoint_options options = {.size = sizeof options};
#define WITH(field, value, status, words)                    \
    options.field = value;                                   \
    SAYS(peerway_endpoint_new(&options, &endpoint), status, words); \
    memset(&options, 0, sizeof options);                     \
    options.size = sizeof options;
    WITH(bind, "nowhere", PEERWAY_STATUS_BAD_ARGUMENT, "bind: 'nowhere'")
    WITH(bind, "\xff\xfe", PEERWAY_STATUS_BAD_ARGUMENT, "bind is not UTF-8")
    WITH(bind, "192.0.2.1:1", PEERWAY_STATUS_LISTEN, "cannot listen on 192.0.2.1:1")
    WITH(advertise, "10.0.0.1:5", PEERWAY_STATUS_BAD_ARGUMENT, "advertise: '10.0.0.1:5' is not an IP address")
    WITH(transport, "pigeon", PEERWAY_STATUS_INVALID_SETTING, "transport: 'pigeon'")
    WITH(transport, "nccl", PEERWAY_STATUS_TRANSPORT_UNAVAILABLE, "nccl")
    WITH(interfaces, "no-such-interface", PEERWAY_STATUS_NO_INTERFACE, "no-such-interface")
    WITH(reserved[2], 1, PEERWAY_STATUS_BAD_ARGUMENT, "reserved")
    WITH(settings_count, 1, PEERWAY_STATUS_NULL_ARGUMENT, "settings")
    struct peerway_setting given[] = {{"PEERWAY_DEADLINE", "5s"}, {"PEERWAY_LANES", ""}};
    options.settings = given;
    options.settings_count = 2;
    OK(peerway_endpoint_new(&options, &endpoint));
    OK(peerway_endpoint_free(endpoint));
    given[1].name = "PEERWAY_LANE";
    SAYS(peerway_endpoint_new(&options, &endpoint), PEERWAY_STATUS_INVALID_SETTING, "did you mean PEERWAY_LANES?");
    given[1].name = NULL;
    SAYS(peerway_endpoint_new(&options, &endpoint), PEERWAY_STATUS_NULL_ARGUMENT, "a setting has no name");
    given[1] = (struct peerway_setting){"PEERWAY_DEADLINE", "soon"};
    SAYS(peerway_endpoint_new(&options, &endpoint), PEERWAY_STATUS_INVALID_SETTING, "PEERWAY_DEADLINE");
}

static void meeting(void) {
    struct peerway_endpoint *endpoint, *other;
    struct peerway_peer *peer;
    struct peerway_notification *notification;
    OK(peerway_endpoint_new(NULL, &endpoint));
    size_t len = 0, needed;
    char text[128];
    SAYS(peerway_endpoint_metadata(endpoint, text, 1, &needed), PEERWAY_STATUS_TOO_SMALL, "the buffer has 1 bytes");
    SAYS(peerway_endpoint_metadata(endpoint, NULL, 4096, &len), PEERWAY_STATUS_NULL_ARGUMENT, "buffer is null");
    TRUE(len == needed && len > 16);
    SAYS(peerway_endpoint_metadata(endpoint, text, sizeof text, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "len is null");
    SAYS(peerway_endpoint_connect(endpoint, "garbage", 7, 0, &peer), PEERWAY_STATUS_INVALID_METADATA, "");
    struct peerway_incarnation whose;
    SAYS(peerway_metadata_incarnation("garbage", 7, &whose), PEERWAY_STATUS_INVALID_METADATA, "not Peerway endpoint metadata");
    SAYS(peerway_metadata_incarnation("garbage", 7, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "incarnation");
    SAYS(peerway_endpoint_connect(endpoint, NULL, 7, 0, &peer), PEERWAY_STATUS_NULL_ARGUMENT, "metadata is null");
    SAYS(peerway_endpoint_connect(endpoint, "", 0, 0, &peer), PEERWAY_STATUS_INVALID_METADATA, "");
    SAYS(peerway_endpoint_connect_address(endpoint, "no port", 0, &peer), PEERWAY_STATUS_BAD_ARGUMENT, "'no port'");
    SAYS(peerway_endpoint_connect_address(endpoint, NULL, 0, &peer), PEERWAY_STATUS_NULL_ARGUMENT, "address is null");
    SAYS(peerway_endpoint_connect_address(endpoint, "127.0.0.1:1", SECOND, &peer), PEERWAY_STATUS_UNREACHABLE, "127.0.0.1:1");
    TRUE(peer == NULL);

    // No peer, no notification, no count.
    SAYS(peerway_endpoint_accept(endpoint, 0, &peer), PEERWAY_STATUS_PENDING, NULL);
    SAYS(peerway_endpoint_accept(endpoint, SECOND / 100, &peer), PEERWAY_STATUS_PENDING, NULL);
    SAYS(peerway_endpoint_notification(endpoint, 0, &notification), PEERWAY_STATUS_PENDING, NULL);
    uint64_t value = 9;
    SAYS(peerway_endpoint_wait_counter(endpoint, 1, 1, SECOND / 100, &value), PEERWAY_STATUS_PENDING, NULL);
    TRUE(value == 0);
    size_t count = 9;
    OK(peerway_endpoint_peers(endpoint, NULL, 0, &count));
    TRUE(count == 0);

    // A connection by address, and the view of the other side.
    OK(peerway_endpoint_new(NULL, &other));
    SAYS(peerway_endpoint_address(other, 99, text, sizeof text, &len), PEERWAY_STATUS_NOTHING, NULL);
    OK(peerway_endpoint_address(other, 0, text, sizeof text, &len));
    TRUE(len == strlen(text) + 1);
    OK(peerway_endpoint_connect_address(endpoint, text, 0, &peer));
    struct peerway_peer *accepted;
    OK(peerway_endpoint_accept(other, 120 * SECOND, &accepted));
    struct peerway_peer_facts facts = {.size = sizeof facts};
    struct peerway_incarnation incarnation;
    OK(peerway_peer_describe(accepted, &facts));
    OK(peerway_endpoint_incarnation(endpoint, &incarnation));
    TRUE(memcmp(&facts.incarnation, &incarnation, sizeof incarnation) == 0 && facts.alive && !facts.initiator);
    SAYS(peerway_endpoint_peers(other, NULL, 0, &count), PEERWAY_STATUS_TOO_SMALL, "room for 0 peers, but there are 1");
    struct peerway_peer *all[4];
    OK(peerway_endpoint_peers(other, all, 4, &count));
    TRUE(count == 1);
    OK(peerway_peer_free(all[0]));
    OK(peerway_peer_free(accepted));

    bool closed = true;
    OK(peerway_endpoint_is_closed(endpoint, &closed));
    TRUE(!closed);
    OK(peerway_endpoint_close(endpoint));
    OK(peerway_endpoint_is_closed(endpoint, &closed));
    TRUE(closed);
    SAYS(peerway_endpoint_accept(endpoint, PEERWAY_FOREVER, &accepted), PEERWAY_STATUS_ENDPOINT_CLOSED, "the endpoint is closed");
    SAYS(peerway_endpoint_notification(endpoint, PEERWAY_FOREVER, &notification), PEERWAY_STATUS_ENDPOINT_CLOSED, "closed");
    SAYS(peerway_endpoint_wait_counter(endpoint, 1, 1, PEERWAY_FOREVER, NULL), PEERWAY_STATUS_ENDPOINT_CLOSED, "closed");
    struct peerway_region *region;
    SAYS(peerway_region_allocate(endpoint, 64, &region), PEERWAY_STATUS_ENDPOINT_CLOSED, "closed");
    OK(peerway_peer_free(peer));
    OK(peerway_endpoint_free(endpoint));
    OK(peerway_endpoint_free(other));
}

static void count_release(void *context) { ++*(int *)context; }

static void memory(void) {
    struct two two = two_with(NULL, BYTES);
    struct peerway_region *region;
    struct peerway_remote *remote;
    unsigned char descriptor[PEERWAY_DESCRIPTOR_LEN], byte = 0;
    SAYS(peerway_region_register(two.here, NULL, 64, &region), PEERWAY_STATUS_BAD_RANGE, "not a range of memory");
    SAYS(peerway_region_register(two.here, &byte, SIZE_MAX, &region), PEERWAY_STATUS_BAD_RANGE, "");
    SAYS(peerway_region_allocate(two.here, SIZE_MAX / 4, &region), PEERWAY_STATUS_ALLOCATE, "cannot allocate");
    SAYS(peerway_region_allocate_gpu(two.here, 0, 64, &region), PEERWAY_STATUS_NO_DRIVER, "no GPU can be used");
    SAYS(peerway_region_register_gpu(two.here, 4096, 64, &region), PEERWAY_STATUS_NO_DRIVER, "");
    SAYS(peerway_gpu_warm_up(0), PEERWAY_STATUS_NO_DRIVER, "");
    SAYS(peerway_region_copy_out(two.ours, BYTES, &byte, 1), PEERWAY_STATUS_OUTSIDE, "");
    SAYS(peerway_region_copy_in(two.ours, UINT64_MAX, &byte, 1), PEERWAY_STATUS_OUTSIDE, "");
    SAYS(peerway_region_copy_in(two.ours, 0, NULL, 1), PEERWAY_STATUS_NULL_ARGUMENT, "from is null");
    SAYS(peerway_region_fill(two.ours, 1, BYTES, 0), PEERWAY_STATUS_OUTSIDE, "");
    OK(peerway_region_copy_out(two.ours, BYTES, NULL, 0));
    SAYS(peerway_region_advertise(two.ours, 0, 64, 9, NULL, descriptor), PEERWAY_STATUS_BAD_ARGUMENT, "9 is not a peerway_access");
    SAYS(peerway_region_advertise(two.ours, BYTES - 1, 2, PEERWAY_ACCESS_READ, NULL, descriptor), PEERWAY_STATUS_OUTSIDE, "leaves");
    SAYS(peerway_region_advertise(two.ours, UINT64_MAX, 2, PEERWAY_ACCESS_READ, NULL, descriptor), PEERWAY_STATUS_OUTSIDE, "leaves");
    SAYS(peerway_region_advertise(two.ours, 0, 2, PEERWAY_ACCESS_READ, NULL, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "descriptor");

    memset(descriptor, 7, sizeof descriptor);
    SAYS(peerway_peer_import(two.peer, descriptor, 63, &remote), PEERWAY_STATUS_INVALID_DESCRIPTOR, "64 bytes, not 63");
    enum peerway_status garbage = peerway_peer_import(two.peer, descriptor, sizeof descriptor, &remote);
    TRUE(garbage == PEERWAY_STATUS_INVALID_DESCRIPTOR || garbage == PEERWAY_STATUS_OTHER_INCARNATION);
    // A descriptor of the wrong endpoint.
    OK(peerway_region_advertise(two.ours, 0, 64, PEERWAY_ACCESS_READ, NULL, descriptor));
    SAYS(peerway_peer_import(two.peer, descriptor, sizeof descriptor, &remote), PEERWAY_STATUS_OTHER_INCARNATION, "not made by this peer");

    // A grant for one direction only.
    struct peerway_remote *readable = import(two.peer, two.theirs, PEERWAY_ACCESS_READ);
    SAYS(peerway_peer_write(two.peer, two.ours, 0, readable, 0, 64), PEERWAY_STATUS_ACCESS, "for read only");
    OK(peerway_peer_read(two.peer, two.ours, 0, readable, 0, 64));
    struct peerway_remote_facts facts = {.size = sizeof facts};
    OK(peerway_remote_describe(readable, &facts));
    TRUE(facts.len == BYTES && facts.access == PEERWAY_ACCESS_READ && !facts.revoked);

    // A revoked grant.
    bool open = true;
    OK(peerway_region_revoke(two.theirs, &open));
    TRUE(!open);
    SAYS(peerway_peer_read(two.peer, two.ours, 0, readable, 0, 64), PEERWAY_STATUS_REVOKED, "revoked");
    OK(peerway_remote_free(readable));

    // The release function runs once, and never if the registration fails.
    static unsigned char owned[4096];
    int released = 0;
    SAYS(peerway_region_register_owned(two.here, owned, sizeof owned, NULL, &released, &region), PEERWAY_STATUS_NULL_ARGUMENT, "release");
    SAYS(peerway_region_register_owned(two.here, NULL, 64, count_release, &released, &region), PEERWAY_STATUS_BAD_RANGE, "");
    SAYS(peerway_region_register_owned(NULL, owned, sizeof owned, count_release, &released, &region), PEERWAY_STATUS_NULL_ARGUMENT, "");
    OK(peerway_region_register_owned(two.here, owned, sizeof owned, count_release, &released, &region));
    TRUE(released == 0);
    OK(peerway_region_free(region));
    TRUE(released == 1);
    free_two(&two);
    TRUE(released == 1);
}

static void work(void) {
    struct two two = two_with(NULL, BYTES), apart = two_with(NULL, BYTES);
    struct peerway_batch *batch;
    struct peerway_transfer *transfer;
    struct peerway_batch_options options = {.size = sizeof options};
#define RANGE(direction, from, to, len) peerway_batch_range(direction, two.ours, from, two.remote, to, len, &options, &batch)
    SAYS(RANGE(9, 0, 0, 64), PEERWAY_STATUS_BAD_ARGUMENT, "9 is not a peerway_direction");
    SAYS(RANGE(PEERWAY_DIRECTION_READ, BYTES - 1, 0, 2), PEERWAY_STATUS_OUTSIDE, "range 65535+2 leaves the region of 65536 bytes");
    SAYS(RANGE(PEERWAY_DIRECTION_READ, 0, 1, BYTES), PEERWAY_STATUS_OUTSIDE, "range 1+65536 leaves the peer's region");
    SAYS(RANGE(PEERWAY_DIRECTION_READ, UINT64_MAX, 0, 2), PEERWAY_STATUS_OUTSIDE, "leaves");
    SAYS(RANGE(PEERWAY_DIRECTION_READ, 0, 2, UINT64_MAX), PEERWAY_STATUS_OUTSIDE, "leaves");
    options.lane_class = 3;
    SAYS(RANGE(PEERWAY_DIRECTION_READ, 0, 0, 2), PEERWAY_STATUS_BAD_ARGUMENT, "3 is not a peerway_class");
    options.lane_class = PEERWAY_CLASS_LATENCY, options.notify_len = 3;
    SAYS(RANGE(PEERWAY_DIRECTION_READ, 0, 0, 2), PEERWAY_STATUS_NULL_ARGUMENT, "notify is null");
    options.notify = &options, options.notify_len = PEERWAY_MAX_NOTIFICATION + 1;
    void *long_message = calloc(1, options.notify_len);
    options.notify = long_message;
    SAYS(RANGE(PEERWAY_DIRECTION_READ, 0, 0, 2), PEERWAY_STATUS_NOTIFICATION_TOO_LONG, "over the cap");
    SAYS(peerway_peer_notify(two.peer, long_message, options.notify_len, &transfer), PEERWAY_STATUS_NOTIFICATION_TOO_LONG, "over the cap");
    free(long_message);
    options.notify = NULL, options.notify_len = 0;

    struct peerway_pair pairs[2] = {{two.ours, 0, two.remote, 0, 64}, {two.ours, 64, two.remote, 64, 64}};
    SAYS(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, NULL, 2, NULL, &batch), PEERWAY_STATUS_NULL_ARGUMENT, "pairs is null");
    SAYS(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, pairs, SIZE_MAX, NULL, &batch), PEERWAY_STATUS_BAD_ARGUMENT, "pairs cannot have");
    pairs[1].local = NULL;
    SAYS(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, pairs, 2, NULL, &batch), PEERWAY_STATUS_NULL_ARGUMENT, "pairs[1]:");
    pairs[1].local = two.ours, pairs[1].len = BYTES;
    SAYS(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, pairs, 2, NULL, &batch), PEERWAY_STATUS_OUTSIDE, "pairs[1]: range 64+65536");
    pairs[1].len = 64, pairs[1].remote = apart.remote;
    SAYS(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, pairs, 2, NULL, &batch), PEERWAY_STATUS_OTHER_PEER, "another peer");
    pairs[1].remote = two.remote;
    OK(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, pairs, 2, NULL, &batch));
    uint64_t total = 0;
    OK(peerway_batch_total(batch, &total));
    TRUE(total == 128);
    SAYS(peerway_peer_post(apart.peer, batch, &transfer), PEERWAY_STATUS_OTHER_PEER, "another peer");
    SAYS(peerway_peer_run(apart.peer, batch, NULL), PEERWAY_STATUS_OTHER_PEER, "");
    struct peerway_end ended = {.size = 3};
    SAYS(peerway_peer_run(two.peer, batch, &ended), PEERWAY_STATUS_BAD_SIZE, "struct peerway_end");
    OK(peerway_peer_post(two.peer, batch, &transfer));
    ended.size = sizeof ended;
    OK(peerway_transfer_wait(transfer, PEERWAY_FOREVER, &ended));
    TRUE(ended.status == PEERWAY_STATUS_OK && !ended.fence_open && ended.size == sizeof ended);

    // Only eventfds are accepted.
    int pipes[2];
    TRUE(pipe(pipes) == 0);
    SAYS(peerway_transfer_signal(transfer, pipes[1]), PEERWAY_STATUS_BAD_ARGUMENT, "is not an eventfd");
    SAYS(peerway_transfer_signal(transfer, -1), PEERWAY_STATUS_BAD_ARGUMENT, "negative");
    SAYS(peerway_transfer_signal(transfer, 123456), PEERWAY_STATUS_BAD_ARGUMENT, "123456 is not an eventfd");
    close(pipes[0]), close(pipes[1]);
    // The transfer has ended, so the eventfd is signalled at once.
    int event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    uint64_t rung = 0;
    OK(peerway_transfer_signal(transfer, event));
    TRUE(read(event, &rung, sizeof rung) == sizeof rung && rung == 1);
    close(event);
    OK(peerway_transfer_free(transfer));
    SAYS(peerway_transfer_wait(transfer, 0, NULL), PEERWAY_STATUS_BAD_HANDLE, "not a handle to a transfer");

    uint32_t indices[3] = {0, 1, 2};
    struct peerway_blocks ours = {.size = sizeof ours, .stride = 64, .len = 64, .indices = indices, .count = 3}, theirs = ours;
#define BLOCKS() peerway_batch_blocks(PEERWAY_DIRECTION_READ, two.ours, &ours, two.remote, &theirs, NULL, &batch)
    OK(peerway_batch_free(batch));
    theirs.count = 2;
    SAYS(BLOCKS(), PEERWAY_STATUS_INVALID_WORK, "");
    theirs.count = 3, theirs.len = 32;
    SAYS(BLOCKS(), PEERWAY_STATUS_INVALID_WORK, "");
    theirs.len = 64, theirs.stride = UINT64_MAX;
    TRUE(BLOCKS() != PEERWAY_STATUS_OK);
    theirs.stride = 64, theirs.indices = NULL;
    SAYS(BLOCKS(), PEERWAY_STATUS_NULL_ARGUMENT, "indices is null");
    theirs.indices = indices, theirs.size = 0;
    SAYS(BLOCKS(), PEERWAY_STATUS_BAD_SIZE, "struct peerway_blocks");

    // Stages.
    struct peerway_staged *staged;
    const struct peerway_batch *none = NULL;
    SAYS(peerway_peer_stage(two.peer, &none, 1, &staged), PEERWAY_STATUS_NULL_ARGUMENT, "a batch is null");
    OK(RANGE(PEERWAY_DIRECTION_WRITE, 0, 0, 64));
    none = batch;
    OK(peerway_peer_stage(two.peer, &none, 1, &staged));
    SAYS(peerway_staged_release(staged, 1), PEERWAY_STATUS_NO_SUCH_STAGE, "there is no stage 1");
    SAYS(peerway_staged_poll(staged, 0, NULL), PEERWAY_STATUS_PENDING, NULL);
    SAYS(peerway_staged_poll(staged, 7, NULL), PEERWAY_STATUS_NO_SUCH_STAGE, "");
    SAYS(peerway_staged_release_in(staged, 0, NULL), PEERWAY_STATUS_GPU, "post it without a stream");
    OK(peerway_staged_release(staged, 0));
    SAYS(peerway_staged_release(staged, 0), PEERWAY_STATUS_ALREADY_RELEASED, "stage 0 was released already");
    OK(peerway_staged_wait(staged, 120 * SECOND, NULL));
    OK(peerway_staged_free(staged));
    struct peerway_prepared *prepared;
    struct peerway_enqueued *enqueued;
    SAYS(peerway_peer_prepare(apart.peer, batch, &prepared), PEERWAY_STATUS_OTHER_PEER, "");
    OK(peerway_peer_prepare(two.peer, batch, &prepared));
    SAYS(peerway_prepared_enqueue(prepared, NULL, &enqueued), PEERWAY_STATUS_GPU, "post it without a stream");
    OK(peerway_prepared_free(prepared));
    OK(peerway_batch_free(batch));

    // A removed peer.
    char gone[96] = "the peer is gone: ";
    size_t prefix = strlen(gone), address_len;
    OK(peerway_peer_address(two.peer, gone + prefix, sizeof gone - prefix, &address_len));
    OK(peerway_peer_remove(two.peer));
    SAYS(peerway_peer_write(two.peer, two.ours, 0, two.remote, 0, 64), PEERWAY_STATUS_PEER_GONE, gone);
    struct peerway_notification *notification;
    SAYS(peerway_peer_notification(two.peer, PEERWAY_FOREVER, &notification), PEERWAY_STATUS_PEER_GONE, "gone");
    free_two(&two);
    free_two(&apart);
}

// Objects of an endpoint may be freed after the endpoint. They no longer work then.
static void freed_in_any_order(void) {
    struct peerway_endpoint_options options = {.size = sizeof options, .transport = "tcp"};
    struct two two = two_with(&options, BYTES);
    struct peerway_batch *batch;
    struct peerway_prepared *prepared;
    struct peerway_transfer *transfer, *late;
    struct peerway_proxy_host *proxy;
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, two.ours, 0, two.remote, 0, BYTES, NULL, &batch));
    OK(peerway_peer_prepare(two.peer, batch, &prepared));
    OK(peerway_proxy_new(two.here, NULL, &proxy));
    OK(peerway_peer_post(two.peer, batch, &transfer));
    OK(peerway_endpoint_free(two.here));
    SAYS(peerway_prepared_post(prepared, &late), PEERWAY_STATUS_ENDPOINT_CLOSED, "the endpoint is closed");
    enum peerway_status ended = peerway_transfer_wait(transfer, PEERWAY_FOREVER, NULL);
    TRUE(ended == PEERWAY_STATUS_OK || ended == PEERWAY_STATUS_ENDPOINT_CLOSED);
    OK(peerway_endpoint_free(two.there));
    unsigned char descriptor[PEERWAY_DESCRIPTOR_LEN];
    SAYS(peerway_region_advertise(two.theirs, 0, 64, PEERWAY_ACCESS_READ, NULL, descriptor), PEERWAY_STATUS_ENDPOINT_CLOSED, "closed");
    OK(peerway_region_fill(two.theirs, 0, BYTES, 1));
    OK(peerway_batch_free(batch));
    OK(peerway_region_free(two.ours));
    OK(peerway_peer_free(two.peer));
    OK(peerway_transfer_free(transfer));
    OK(peerway_proxy_free(proxy));
    OK(peerway_remote_free(two.remote));
    OK(peerway_prepared_free(prepared));
    OK(peerway_region_free(two.theirs));
}

static void exhaustion(void) {
    // Slots: two transfers that are not polled.
    struct peerway_endpoint_options options = {.size = sizeof options, .transport = "tcp", .slots = 2, .notify_bytes = 64 << 10};
    struct two two = two_with(&options, 1 << 22);
    struct peerway_batch *batch;
    struct peerway_transfer *transfers[3];
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, two.ours, 0, two.remote, 0, 1 << 22, NULL, &batch));
    OK(peerway_peer_post(two.peer, batch, &transfers[0]));
    OK(peerway_peer_post(two.peer, batch, &transfers[1]));
    SAYS(peerway_peer_post(two.peer, batch, &transfers[2]), PEERWAY_STATUS_BUSY, "all 2 transfer slots are in use");
    TRUE(transfers[2] == NULL);
    struct peerway_end ended = {.size = sizeof ended};
    OK(peerway_transfer_cancel(transfers[0]));
    enum peerway_status first = peerway_transfer_wait(transfers[0], PEERWAY_FOREVER, &ended);
    TRUE((first == PEERWAY_STATUS_OK || first == PEERWAY_STATUS_CANCELLED) && ended.status == (int)first && !ended.fence_open);
    OK(peerway_transfer_wait(transfers[1], PEERWAY_FOREVER, &ended));
    OK(peerway_peer_run(two.peer, batch, NULL));
    struct peerway_peer_stats stats = {.size = sizeof stats};
    OK(peerway_peer_statistics(two.peer, &stats));
    struct peerway_quarantine_stats kept = {.size = sizeof kept, .regions = 99};
    OK(peerway_quarantine(&kept));
    TRUE(kept.regions == 0 && kept.bytes == 0);
    SAYS(peerway_quarantine(NULL), PEERWAY_STATUS_NULL_ARGUMENT, "null");
    TRUE(stats.transfers >= 3 && stats.bytes_written >= 1 << 22);
    struct peerway_endpoint_stats runs = {.size = sizeof runs};
    OK(peerway_endpoint_statistics(two.here, &runs));
    TRUE(runs.peers == 1 && runs.transfers == stats.transfers && runs.bytes_written == stats.bytes_written);
    struct peerway_refusal_stats refused = {.size = sizeof refused, .sessions = 99};
    OK(peerway_endpoint_refusals(two.here, &refused));
    TRUE(refused.sessions == 0 && refused.counts_without_right == 0);
    SAYS(peerway_endpoint_refusals(two.here, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "null");
    char cpus[4096];
    size_t cpus_len;
    OK(peerway_endpoint_cpus(two.here, cpus, sizeof cpus, &cpus_len));
    TRUE(runs.cpus >= 1 && cpus_len >= 2 && cpus[0] >= '0' && cpus[0] <= '9');
    OK(peerway_transfer_free(transfers[0]));
    OK(peerway_transfer_free(transfers[1]));
    OK(peerway_batch_free(batch));

    // Notifications: the endpoint keeps 64 KiB. A peer with queued notifications gets at most half.
    static char message[48 << 10] = "kept";
    OK(peerway_peer_notify(two.peer, message, sizeof message, &transfers[0]));
    OK(peerway_transfer_wait(transfers[0], PEERWAY_FOREVER, NULL));
    OK(peerway_transfer_free(transfers[0]));
    OK(peerway_peer_notify(two.peer, message, sizeof message, &transfers[0]));
    SAYS(peerway_transfer_wait(transfers[0], PEERWAY_FOREVER, &ended), PEERWAY_STATUS_NOTIFICATIONS_FULL, "queue is full");
    TRUE(ended.status == PEERWAY_STATUS_NOTIFICATIONS_FULL);
    OK(peerway_transfer_free(transfers[0]));
    struct peerway_notification *notification;
    const void *said;
    size_t len;
    OK(peerway_endpoint_notification(two.there, SECOND, &notification));
    SAYS(peerway_notification_message(notification, NULL, &len, NULL), PEERWAY_STATUS_NULL_ARGUMENT, "message is null");
    OK(peerway_notification_message(notification, &said, &len, NULL));
    TRUE(len == sizeof message && strcmp(said, "kept") == 0);
    OK(peerway_notification_free(notification));
    free_two(&two);
}

// Times that no clock can reach mean "never". Counts above the maximum are refused.
static void extremes(void) {
    struct peerway_endpoint *endpoint;
    struct peerway_endpoint_options many = {.size = sizeof many, .lanes = UINT16_MAX};
    SAYS(peerway_endpoint_new(&many, &endpoint), PEERWAY_STATUS_INVALID_SETTING, "lanes (PEERWAY_LANES)=\"65535\"");
    many.lanes = 0, many.shards = UINT16_MAX;
    SAYS(peerway_endpoint_new(&many, &endpoint), PEERWAY_STATUS_INVALID_SETTING, "from 1 to 64");
    struct peerway_endpoint_options options = {.size = sizeof options,
                                               .deadline_ns = UINT64_MAX,
                                               .detect_ns = UINT64_MAX,
                                               .fence_ns = UINT64_MAX,
                                               .connect_timeout_ns = UINT64_MAX,
                                               .spin_ns = UINT64_MAX,
                                               .notify_bytes = UINT64_MAX,
                                               .copy_threads = 64,
                                               .shards = 64,
                                               .lanes = 64,
                                               .transport = "tcp"};
    struct two two = two_with(&options, BYTES);
    struct peerway_batch_options forever = {.size = sizeof forever, .deadline_ns = UINT64_MAX};
    struct peerway_batch *batch;
    struct peerway_peer *peer;
    struct peerway_proxy_host *proxy;
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, two.ours, 0, two.remote, 0, BYTES, &forever, &batch));
    OK(peerway_peer_run(two.peer, batch, NULL));
    OK(peerway_batch_free(batch));
    SAYS(peerway_endpoint_connect_address(two.here, "127.0.0.1:1", PEERWAY_FOREVER, &peer), PEERWAY_STATUS_UNREACHABLE, "127.0.0.1:1");
    char address[128];
    size_t len;
    OK(peerway_endpoint_address(two.there, 0, address, sizeof address, &len));
    OK(peerway_endpoint_connect_address(two.here, address, PEERWAY_FOREVER, &peer));
    OK(peerway_peer_free(peer));
    struct peerway_proxy_options most = {.size = sizeof most, .timeout_ns = UINT64_MAX};
    OK(peerway_proxy_new(two.here, &most, &proxy));
    OK(peerway_proxy_free(proxy));
    struct peerway_proxy_options copiers = {.size = sizeof copiers, .copier = 3};
    SAYS(peerway_proxy_new(two.here, &copiers, &proxy), PEERWAY_STATUS_BAD_ARGUMENT, "peerway_copier");
    // Empty transfers.
    OK(peerway_peer_write(two.peer, two.ours, BYTES, two.remote, BYTES, 0));
    OK(peerway_batch_vector(PEERWAY_DIRECTION_WRITE, NULL, 0, NULL, &batch));
    enum peerway_status empty = peerway_peer_run(two.peer, batch, NULL);
    TRUE(empty == PEERWAY_STATUS_OK || empty == PEERWAY_STATUS_INVALID_WORK);
    OK(peerway_batch_free(batch));
    free_two(&two);
}

static void after_a_fork(void) {
    struct peerway_endpoint *endpoint;
    int pipes[2];
    char verdict = 0;
    OK(peerway_endpoint_new(NULL, &endpoint));
    TRUE(pipe(pipes) == 0);
    pid_t child = fork();
    if (child == 0) {
        struct peerway_region *region;
        SAYS(peerway_region_allocate(endpoint, 64, &region), PEERWAY_STATUS_FORKED, "belongs to the parent process");
        TRUE(write(pipes[1], "y", 1) == 1);
        // Kill the child: it lacks the parent's threads, so valgrind would report their memory as
        // lost.
        raise(SIGKILL);
    }
    close(pipes[1]);
    TRUE(read(pipes[0], &verdict, 1) == 1 && verdict == 'y');
    close(pipes[0]);
    TRUE(waitpid(child, NULL, 0) == child);
    OK(peerway_endpoint_free(endpoint));
}

static void proxies(void) {
    struct two two = two_with(NULL, BYTES);
    struct peerway_proxy_options options = {.size = sizeof options, .threads = 1, .rings = 2, .peers = 4, .counters = 8};
    struct peerway_proxy_host *proxy;
    struct peerway_window window;
    struct peerway_proxy_fault fault = {.size = sizeof fault};
    char text[128];
    size_t len;
    options.rings = 100000;
    SAYS(peerway_proxy_new(two.here, &options, &proxy), PEERWAY_STATUS_OUT_OF_RANGE, "rings must be between 1 and 4096");
    options.rings = 2, options.gpu = 1;
    SAYS(peerway_proxy_new(two.here, &options, &proxy), PEERWAY_STATUS_BAD_ARGUMENT, "on_gpu is zero");
    options.on_gpu = 1;
    SAYS(peerway_proxy_new(two.here, &options, &proxy), PEERWAY_STATUS_NO_DRIVER, "no GPU can be used");
    options.on_gpu = options.gpu = 0;
    OK(peerway_proxy_new(two.here, &options, &proxy));
    SAYS(peerway_proxy_disarm(proxy), PEERWAY_STATUS_NOT_ARMED, "not armed");
    OK(peerway_proxy_arm(proxy));
    OK(peerway_proxy_disarm(proxy));
    SAYS(peerway_proxy_window(proxy, NULL, &window), PEERWAY_STATUS_NULL_ARGUMENT, "a region is null");
    SAYS(peerway_proxy_add_peer(proxy, 0, two.peer, "garbage", 7, NULL), PEERWAY_STATUS_NOT_PEER_INFO, "not the bytes of a proxy's info");
    SAYS(peerway_proxy_add_peer(proxy, 4, two.peer, "garbage", 7, NULL), PEERWAY_STATUS_OUT_OF_RANGE, "a peer's number");
    SAYS(peerway_proxy_peer_window(proxy, 0, 0, &window), PEERWAY_STATUS_NOTHING, NULL);
    SAYS(peerway_proxy_take_fault(proxy, &fault), PEERWAY_STATUS_NOTHING, NULL);
    SAYS(peerway_proxy_stop_forwarding(proxy, 3), PEERWAY_STATUS_NOTHING, NULL);
    struct peerway_forward rule = {.size = sizeof rule, .counter = 99, .from = {two.ours, 0, 64}};
    SAYS(peerway_proxy_forward(proxy, &rule), PEERWAY_STATUS_BAD_RULE, "there is no such counter");
    rule.counter = 1, rule.to_count = 1;
    SAYS(peerway_proxy_forward(proxy, &rule), PEERWAY_STATUS_NULL_ARGUMENT, "to is null");
    struct peerway_place to = {two.ours, BYTES - 1, 64};
    rule.to = &to;
    SAYS(peerway_proxy_forward(proxy, &rule), PEERWAY_STATUS_OUTSIDE, "leaves");
    SAYS(peerway_proxy_wait_counter(proxy, 1, 1, SECOND / 100, NULL), PEERWAY_STATUS_PENDING, NULL);
    SAYS(peerway_fault_text(0, text, sizeof text, &len), PEERWAY_STATUS_NOTHING, NULL);
    OK(peerway_fault_text(6, text, sizeof text, &len));
    TRUE(strcmp(text, "the peer is gone") == 0);
    OK(peerway_proxy_free(proxy));
    SAYS(peerway_proxy_arm(proxy), PEERWAY_STATUS_BAD_HANDLE, "not a handle to a proxy");
    free_two(&two);
}

int main(void) {
    // The tests must not find a GPU of this machine.
    setenv("PEERWAY_CUDA_SO", "/nonexistent/libcuda.so", 1);
    null_and_stale_handles();
    sizes_of_structs();
    settings();
    meeting();
    memory();
    work();
    freed_in_any_order();
    exhaustion();
    extremes();
    after_a_fork();
    proxies();
    puts("bad input: every call returned the expected status");
    return 0;
}
