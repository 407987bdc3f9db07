// Helpers of the C tests: they check the status and the error message of a call.
#ifndef PEERWAY_TESTS_CHECK_H
#define PEERWAY_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <peerway.h>

#define SECOND 1000000000ull
#define OK(call) says((call), PEERWAY_STATUS_OK, NULL, #call, __FILE__, __LINE__)
// The call must return this status, with an error message that contains these words.
#define SAYS(call, status, words) says((call), (status), (words), #call, __FILE__, __LINE__)
#define TRUE(condition) holds((condition), #condition, __FILE__, __LINE__)

static inline void says(enum peerway_status got, enum peerway_status wanted, const char *words, const char *call, const char *file,
                        int line) {
    if (got != wanted) {
        fprintf(stderr, "%s:%d: %s\n  returned %s instead of %s: %s\n", file, line, call, peerway_status_name(got), peerway_status_name(wanted),
                peerway_last_error());
        exit(1);
    }
    if (words && !strstr(peerway_last_error(), words)) {
        fprintf(stderr, "%s:%d: %s\n  the message \"%s\" lacks \"%s\"\n", file, line, call, peerway_last_error(), words);
        exit(1);
    }
}

static inline void holds(int yes, const char *condition, const char *file, int line) {
    if (yes) return;
    fprintf(stderr, "%s:%d: false: %s\n", file, line, condition);
    exit(1);
}

// Two endpoints of this process. The first has imported memory of the second.
struct two {
    struct peerway_endpoint *here, *there;
    struct peerway_peer *peer;
    struct peerway_region *ours, *theirs;
    struct peerway_remote *remote;
};

static inline struct peerway_peer *connect_to(const struct peerway_endpoint *from, const struct peerway_endpoint *to) {
    unsigned char metadata[1024];
    size_t len;
    struct peerway_peer *peer;
    OK(peerway_endpoint_metadata(to, metadata, sizeof metadata, &len));
    OK(peerway_endpoint_connect(from, metadata, len, 0, &peer));
    return peer;
}

static inline struct peerway_remote *import(const struct peerway_peer *peer, const struct peerway_region *region, uint32_t access) {
    unsigned char descriptor[PEERWAY_DESCRIPTOR_LEN];
    struct peerway_remote *remote;
    OK(peerway_region_advertise(region, 0, UINT64_MAX, access, NULL, descriptor));
    OK(peerway_peer_import(peer, descriptor, sizeof descriptor, &remote));
    return remote;
}

static inline struct two two_with(const struct peerway_endpoint_options *options, size_t bytes) {
    struct two two;
    OK(peerway_endpoint_new(options, &two.here));
    OK(peerway_endpoint_new(options, &two.there));
    OK(peerway_region_allocate(two.here, bytes, &two.ours));
    OK(peerway_region_allocate(two.there, bytes, &two.theirs));
    two.peer = connect_to(two.here, two.there);
    two.remote = import(two.peer, two.theirs, PEERWAY_ACCESS_READ_WRITE);
    return two;
}

static inline void free_two(struct two *two) {
    OK(peerway_remote_free(two->remote));
    OK(peerway_peer_free(two->peer));
    OK(peerway_region_free(two->ours));
    OK(peerway_region_free(two->theirs));
    OK(peerway_endpoint_free(two->here));
    OK(peerway_endpoint_free(two->there));
}

#endif
