// A peer revokes memory, is stopped, and then killed while transfers to it are in flight. The
// transfers end in time, with the right status and fence.
#define _GNU_SOURCE
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define BYTES ((size_t)64 << 20)

struct invitation {
    unsigned char metadata[1024], descriptor[PEERWAY_DESCRIPTOR_LEN], short_lived[PEERWAY_DESCRIPTOR_LEN];
    size_t metadata_len;
};

static const struct peerway_endpoint_options OPTIONS = {.size = sizeof OPTIONS,
                                                        .transport = "tcp",
                                                        .deadline_ns = SECOND,
                                                        .detect_ns = 120 * SECOND,
                                                        .fence_ns = SECOND / 2};

// Owns memory until the process is killed. Revokes a second region when a byte arrives, and answers
// with a byte that says whether the fence is open.
static void owner(int socket) {
    struct peerway_endpoint *endpoint;
    struct peerway_region *region, *second;
    struct invitation invitation;
    // A check that fails in the parent must leave no process behind.
    TRUE(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
    memset(&invitation, 0, sizeof invitation);
    OK(peerway_endpoint_new(&OPTIONS, &endpoint));
    OK(peerway_region_allocate(endpoint, BYTES, &region));
    OK(peerway_endpoint_metadata(endpoint, invitation.metadata, sizeof invitation.metadata, &invitation.metadata_len));
    OK(peerway_region_advertise(region, 0, UINT64_MAX, PEERWAY_ACCESS_READ_WRITE, NULL, invitation.descriptor));
    OK(peerway_region_allocate(endpoint, BYTES, &second));
    OK(peerway_region_advertise(second, 0, UINT64_MAX, PEERWAY_ACCESS_READ_WRITE, NULL, invitation.short_lived));
    TRUE(write(socket, &invitation, sizeof invitation) == sizeof invitation);
    unsigned char byte;
    bool open;
    TRUE(read(socket, &byte, 1) == 1);
    OK(peerway_region_revoke(second, &open));
    byte = open;
    TRUE(write(socket, &byte, 1) == 1);
    for (;;) pause();
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

// A failure names the peer, and so does the message of the last call.
static void check(const struct peerway_failure *failure, const struct peerway_peer *peer, enum peerway_status status) {
    struct peerway_peer_facts facts = {.size = sizeof facts};
    char address[64];
    size_t len;
    OK(peerway_peer_describe(peer, &facts));
    OK(peerway_peer_address(peer, address, sizeof address, &len));
    TRUE(failure->status == (int)status && failure->operation == PEERWAY_OPERATION_WRITE);
    TRUE(failure->path == PEERWAY_PATH_TCP && failure->bytes_total == BYTES && failure->bytes_done <= BYTES);
    TRUE(memcmp(&failure->incarnation, &facts.incarnation, sizeof facts.incarnation) == 0);
    TRUE(strcmp(failure->peer, address) == 0 && strstr(peerway_last_error(), address));
}

int main(void) {
    int sockets[2];
    struct invitation invitation;
    TRUE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    pid_t child = fork();
    if (child == 0) owner(sockets[1]);
    TRUE(recv(sockets[0], &invitation, sizeof invitation, MSG_WAITALL) == sizeof invitation);

    struct peerway_endpoint *endpoint;
    struct peerway_peer *peer;
    struct peerway_remote *remote;
    struct peerway_region *region;
    struct peerway_batch *batch;
    struct peerway_transfer *transfer;
    struct peerway_end ended = {.size = sizeof ended};
    OK(peerway_endpoint_new(&OPTIONS, &endpoint));
    OK(peerway_region_allocate(endpoint, BYTES, &region));
    OK(peerway_endpoint_connect(endpoint, invitation.metadata, invitation.metadata_len, 0, &peer));
    OK(peerway_peer_import(peer, invitation.descriptor, sizeof invitation.descriptor, &remote));
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, region, 0, remote, 0, BYTES, NULL, &batch));

    // Revoked: the peer refuses every frame, and says why. The session and its lanes live on.
    struct peerway_failure failure = {.size = sizeof failure};
    struct peerway_remote *short_lived;
    struct peerway_batch *late;
    unsigned char open = 2;
    OK(peerway_peer_import(peer, invitation.short_lived, sizeof invitation.short_lived, &short_lived));
    // The deadline of the endpoint is for the stopped peer.
    struct peerway_batch_options patient = {.size = sizeof patient, .deadline_ns = 120 * SECOND};
    OK(peerway_batch_range(PEERWAY_DIRECTION_WRITE, region, 0, short_lived, 0, BYTES, &patient, &late));
    OK(peerway_peer_post(peer, late, &transfer));
    OK(peerway_transfer_wait(transfer, PEERWAY_FOREVER, NULL));
    SAYS(peerway_transfer_failure(transfer, &failure), PEERWAY_STATUS_NOTHING, NULL);
    OK(peerway_transfer_free(transfer));
    TRUE(write(sockets[0], "r", 1) == 1 && read(sockets[0], &open, 1) == 1 && open == 0);
    OK(peerway_peer_post(peer, late, &transfer));
    SAYS(peerway_transfer_wait(transfer, PEERWAY_FOREVER, &ended), PEERWAY_STATUS_REVOKED, "the peer revoked the region; the fence is held");
    TRUE(ended.status == PEERWAY_STATUS_REVOKED && !ended.fence_open);
    OK(peerway_transfer_failure(transfer, &failure));
    check(&failure, peer, PEERWAY_STATUS_REVOKED);
    TRUE(failure.fence == PEERWAY_FENCE_HELD && failure.bytes_done == 0 && !failure.last_event[0]);
    OK(peerway_transfer_free(transfer));
    OK(peerway_batch_free(late));
    OK(peerway_remote_free(short_lived));
    struct peerway_peer_facts facts = {.size = sizeof facts};
    OK(peerway_peer_describe(peer, &facts));
    TRUE(facts.alive);

    // Stopped: the deadline ends the transfer. Bytes that the peer has not acknowledged may still
    // arrive.
    TRUE(kill(child, SIGSTOP) == 0);
    double start = seconds();
    OK(peerway_peer_post(peer, batch, &transfer));
    SAYS(peerway_transfer_wait(transfer, 0, &ended), PEERWAY_STATUS_PENDING, NULL);
    TRUE(ended.status == PEERWAY_STATUS_PENDING);
    SAYS(peerway_transfer_wait(transfer, PEERWAY_FOREVER, &ended), PEERWAY_STATUS_DEADLINE, "the deadline passed; the fence is open");
    TRUE(ended.status == PEERWAY_STATUS_DEADLINE && ended.fence_open && seconds() - start < 60);
    struct peerway_transfer_stats stats = {.size = sizeof stats};
    OK(peerway_transfer_statistics(transfer, &stats));
    TRUE(stats.bytes_total == BYTES && stats.bytes_done < BYTES && stats.path == PEERWAY_PATH_TCP);
    OK(peerway_transfer_failure(transfer, &failure));
    check(&failure, peer, PEERWAY_STATUS_DEADLINE);
    TRUE(failure.fence == PEERWAY_FENCE_OPEN && failure.bytes_done < BYTES && !failure.last_event[0]);
    uint32_t fence = PEERWAY_FENCE_HELD;
    OK(peerway_transfer_fence(transfer, &fence));
    TRUE(fence == PEERWAY_FENCE_OPEN);
    // The peer runs again and answers. The same handle then reports a held fence.
    TRUE(kill(child, SIGCONT) == 0);
    while (fence == PEERWAY_FENCE_OPEN && seconds() - start < 60) {
        OK(peerway_transfer_fence(transfer, &fence));
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    TRUE(fence == PEERWAY_FENCE_HELD);
    SAYS(peerway_transfer_poll(transfer, &ended), PEERWAY_STATUS_DEADLINE, "the deadline passed");
    TRUE(!ended.fence_open);
    OK(peerway_transfer_failure(transfer, &failure));
    TRUE(failure.fence == PEERWAY_FENCE_HELD);
    OK(peerway_transfer_free(transfer));

    // Cancelled, and done: one failed because of this process, the other did not fail.
    OK(peerway_peer_post(peer, batch, &transfer));
    SAYS(peerway_transfer_failure(NULL, &failure), PEERWAY_STATUS_NULL_ARGUMENT, "the handle to a transfer is null");
    OK(peerway_transfer_cancel(transfer));
    enum peerway_status status = peerway_transfer_wait(transfer, PEERWAY_FOREVER, NULL);
    if (status == PEERWAY_STATUS_CANCELLED) {
        TRUE(strstr(peerway_last_error(), "was cancelled after") != NULL);
        OK(peerway_transfer_failure(transfer, &failure));
        check(&failure, peer, PEERWAY_STATUS_CANCELLED);
    } else {
        TRUE(status == PEERWAY_STATUS_OK);
        SAYS(peerway_transfer_failure(transfer, &failure), PEERWAY_STATUS_NOTHING, NULL);
    }
    OK(peerway_transfer_free(transfer));
    TRUE(kill(child, SIGSTOP) == 0 && waitpid(child, NULL, WUNTRACED) == child);

    // Killed: the transfer ends because the peer is gone.
    OK(peerway_peer_post(peer, batch, &transfer));
    SAYS(peerway_transfer_failure(transfer, &failure), PEERWAY_STATUS_PENDING, NULL);
    TRUE(kill(child, SIGKILL) == 0);
    SAYS(peerway_transfer_wait(transfer, PEERWAY_FOREVER, &ended), PEERWAY_STATUS_PEER_GONE, "the peer is gone");
    TRUE(ended.status == PEERWAY_STATUS_PEER_GONE && seconds() - start < 120);
    OK(peerway_transfer_failure(transfer, &failure));
    check(&failure, peer, PEERWAY_STATUS_PEER_GONE);
    TRUE(failure.last_event[0] && strstr(peerway_last_error(), failure.last_event));
    OK(peerway_transfer_free(transfer));
    TRUE(waitpid(child, NULL, 0) == child);
    SAYS(peerway_peer_post(peer, batch, &transfer), PEERWAY_STATUS_PEER_GONE, "the peer is gone");
    TRUE(strstr(peerway_last_error(), failure.peer) != NULL);
    OK(peerway_peer_describe(peer, &facts));
    TRUE(!facts.alive);
    struct peerway_peer *again;
    SAYS(peerway_endpoint_connect(endpoint, invitation.metadata, invitation.metadata_len, SECOND, &again), PEERWAY_STATUS_UNREACHABLE,
         "cannot reach the peer");

    OK(peerway_batch_free(batch));
    OK(peerway_region_free(region));
    OK(peerway_remote_free(remote));
    OK(peerway_peer_free(peer));
    OK(peerway_endpoint_free(endpoint));
    puts("lost: every transfer ended");
    return 0;
}
