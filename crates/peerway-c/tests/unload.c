// A program that loads the library and lets go of it again while its threads run, as plugins do: the library stays.
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
    // Only asks whether it is still there.
    if (!dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD)) return fprintf(stderr, "it was unloaded\n"), 1;
    for (int round = 0; round < 3; round++) {
        library = load(arguments[1]);
        enum peerway_status (*make)(const struct peerway_endpoint_options *, struct peerway_endpoint **);
        *(void **)&make = library ? dlsym(library, "peerway_endpoint_new") : NULL;
        struct peerway_endpoint *endpoint;
        if (!make || make(NULL, &endpoint) != PEERWAY_STATUS_OK) return 1;
        dlclose(library);
        // Its threads are still there, and need their code.
        usleep(50000);
    }
    puts("unload: it stayed");
    return 0;
}
