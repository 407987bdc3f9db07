// A program loads the library and closes it while its threads run, as plugins do. The library stays
// loaded.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include <peerway.h>

static void *load(const char *name) {
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) fprintf(stderr, "%s\n", dlerror());
    return library;
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
    void *library = load(arguments[1]);
    if (!library || dlclose(library) != 0) return 1;
    // RTLD_NOLOAD only tests whether the library is still loaded.
    if (!dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD)) return fprintf(stderr, "the library was unloaded\n"), 1;
    for (int round = 0; round < 3; round++) {
        library = load(arguments[1]);
        enum peerway_status (*make)(const struct peerway_endpoint_options *, struct peerway_endpoint **);
        *(void **)&make = library ? dlsym(library, "peerway_endpoint_new") : NULL;
        struct peerway_endpoint *endpoint;
        if (!make || make(NULL, &endpoint) != PEERWAY_STATUS_OK) return 1;
        dlclose(library);
        // The endpoint's threads still run, and need the library's code.
        usleep(50000);
    }
    puts("unload: the library stayed loaded");
    return 0;
}
