// Two processes: one owns memory. The other writes it, reads it, moves blocks into it, and notifies
// the owner.
//
//   cc -std=c11 transfer.c $(pkg-config --cflags --libs peerway) -o transfer && ./transfer
#define _GNU_SOURCE
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <peerway.h>

#define MIB ((size_t)1 << 20)
#define BLOCK 4096
#define SECOND 1000000000ull

// Ends the process with the library's error message if a call fails.
#define MUST(call) must((call), #call, __LINE__)

static void must(enum peerway_status status, const char *call, int line) {
    if (status == PEERWAY_STATUS_OK) return;
    fprintf(stderr, "line %d: %s\n  %s: %s\n", line, call, peerway_status_name(status), peerway_last_error());
    exit(1);
}

static void expect(int yes, const char *what) {
    if (yes) return;
    fprintf(stderr, "failed: %s\n", what);
    exit(1);
}

// The owner sends this to the reader: through a socket here, by any means in general.
struct invitation {
    unsigned char metadata[1024];
    size_t metadata_len;
    unsigned char descriptor[PEERWAY_DESCRIPTOR_LEN];
};

static int owner(int socket) {
    struct peerway_endpoint *endpoint;
    struct peerway_region *memory;
    struct invitation invitation;
    memset(&invitation, 0, sizeof invitation);
    MUST(peerway_endpoint_new(NULL, &endpoint));
    MUST(peerway_region_allocate(endpoint, MIB, &memory));
    MUST(peerway_endpoint_metadata(endpoint, invitation.metadata, sizeof invitation.metadata, &invitation.metadata_len));
    MUST(peerway_region_advertise(memory, 0, UINT64_MAX, PEERWAY_ACCESS_READ_WRITE, NULL, invitation.descriptor));
    expect(write(socket, &invitation, sizeof invitation) == sizeof invitation, "send the invitation");

    // The blocks have arrived when the counter rises. The notification carries a message. Both come
    // after the bytes.
    MUST(peerway_endpoint_wait_counter(endpoint, 7, 1, 30 * SECOND, NULL));
    struct peerway_notification *notification;
    const void *message;
    size_t len;
    MUST(peerway_endpoint_notification(endpoint, 30 * SECOND, &notification));
    MUST(peerway_notification_message(notification, &message, &len, NULL));
    printf("owner: received \"%.*s\"\n", (int)len, (const char *)message);
    MUST(peerway_notification_free(notification));

    struct peerway_region_facts facts = {.size = sizeof facts};
    MUST(peerway_region_describe(memory, &facts));
    const unsigned char *bytes = (const unsigned char *)(uintptr_t)facts.address;
    expect(bytes[17 * BLOCK] == 'a' && bytes[4 * BLOCK] == 'b' && bytes[99 * BLOCK] == 'c', "the blocks have arrived");

    // Wait until the reader closes its socket.
    char byte;
    expect(read(socket, &byte, 1) == 0, "the reader closes its socket");
    MUST(peerway_region_free(memory));
    MUST(peerway_endpoint_free(endpoint));
    return 0;
}

static int reader(int socket) {
    struct invitation invitation;
    expect(recv(socket, &invitation, sizeof invitation, MSG_WAITALL) == sizeof invitation, "receive the invitation");

    struct peerway_endpoint_options options = {.size = sizeof options, .deadline_ns = 20 * SECOND};
    struct peerway_endpoint *endpoint;
    struct peerway_peer *peer;
    struct peerway_remote *remote;
    MUST(peerway_endpoint_new(&options, &endpoint));
    MUST(peerway_endpoint_connect(endpoint, invitation.metadata, invitation.metadata_len, 0, &peer));
    MUST(peerway_peer_import(peer, invitation.descriptor, sizeof invitation.descriptor, &remote));
    char path[256];
    size_t path_len;
    MUST(peerway_peer_path(peer, path, sizeof path, &path_len));
    printf("reader: connected by %s\n", path);

    // Any memory can be registered.
    unsigned char *ours = malloc(MIB);
    expect(ours != NULL, "allocate memory");
    memset(ours, 42, MIB);
    struct peerway_region *region;
    MUST(peerway_region_register(endpoint, ours, MIB, &region));

    // Blocking calls return the status of the transfer.
    MUST(peerway_peer_write(peer, region, 0, remote, 0, MIB));
    memset(ours, 0, MIB);
    MUST(peerway_peer_read(peer, region, 0, remote, 0, MIB));
    expect(ours[0] == 42 && ours[MIB - 1] == 42, "the reader reads back the written bytes");

    // Three blocks of a paged cache, with a counter and a notification after them. The call posts
    // them, and an eventfd signals the end.
    ours[0] = 'a', ours[BLOCK] = 'b', ours[2 * BLOCK] = 'c';
    const uint32_t from[] = {0, 1, 2}, to[] = {17, 4, 99};
    struct peerway_blocks local = {.size = sizeof local, .stride = BLOCK, .len = BLOCK, .indices = from, .count = 3};
    struct peerway_blocks there = {.size = sizeof there, .stride = BLOCK, .len = BLOCK, .indices = to, .count = 3};
    struct peerway_batch_options after = {.size = sizeof after, .notify = "three blocks", .notify_len = 12, .counts = 1, .counter = 7};
    struct peerway_batch *batch;
    struct peerway_transfer *transfer;
    MUST(peerway_batch_blocks(PEERWAY_DIRECTION_WRITE, region, &local, remote, &there, &after, &batch));
    MUST(peerway_peer_post(peer, batch, &transfer));
    int event = eventfd(0, EFD_CLOEXEC);
    MUST(peerway_transfer_signal(transfer, event));
    struct pollfd ready = {.fd = event, .events = POLLIN};
    expect(poll(&ready, 1, 30000) == 1, "the eventfd signals the end");
    struct peerway_end ended = {.size = sizeof ended};
    MUST(peerway_transfer_poll(transfer, &ended));
    struct peerway_transfer_stats stats = {.size = sizeof stats};
    MUST(peerway_transfer_statistics(transfer, &stats));
    printf("reader: %llu bytes by %s, fence %s\n", (unsigned long long)stats.bytes_done, peerway_path_name(stats.path),
           ended.fence_open ? "open" : "held");
    MUST(peerway_transfer_free(transfer));
    close(event);

    // Prepared once, posted many times.
    struct peerway_batch *layer;
    struct peerway_prepared *prepared;
    MUST(peerway_batch_range(PEERWAY_DIRECTION_READ, region, 0, remote, 0, 64 * BLOCK, NULL, &layer));
    MUST(peerway_peer_prepare(peer, layer, &prepared));
    for (int round = 0; round < 10; round++) MUST(peerway_prepared_run(prepared, NULL));
    expect(ours[17 * BLOCK] == 'a' && ours[4 * BLOCK] == 'b', "the reader reads back the blocks");

    // A failed call has a status and an error message.
    enum peerway_status status = peerway_peer_write(peer, region, 0, remote, MIB - 1, 2);
    expect(status == PEERWAY_STATUS_OUTSIDE, peerway_status_name(status));
    printf("reader: refused as expected: %s\n", peerway_last_error());

    MUST(peerway_prepared_free(prepared));
    MUST(peerway_batch_free(layer));
    MUST(peerway_batch_free(batch));
    MUST(peerway_region_free(region));
    MUST(peerway_remote_free(remote));
    MUST(peerway_peer_free(peer));
    MUST(peerway_endpoint_free(endpoint));
    free(ours);
    return 0;
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    int sockets[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "create a pair of sockets");
    // Fork before an endpoint exists: a child cannot use an inherited endpoint.
    pid_t child = fork();
    expect(child >= 0, "start a second process");
    if (child == 0) {
        close(sockets[0]);
        return owner(sockets[1]);
    }
    close(sockets[1]);
    int failed = reader(sockets[0]);
    close(sockets[0]);
    int status = 1;
    expect(waitpid(child, &status, 0) == child && status == 0, "the owner exits with success");
    return failed;
}
