/*
 * loader.c: loads libibverbs by the given name, as programs do that are not linked with it, and prints the names of the
 * devices. A function is looked up with its version and without.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <infiniband/verbs.h>

static void *find(void *library, const char *name)
{
    void *found = dlvsym(library, name, "IBVERBS_1.1");
    if (found == NULL || dlsym(library, name) != found) {
        fprintf(stderr, "%s: %s\n", name, found == NULL ? dlerror() : "two functions");
        exit(EXIT_FAILURE);
    }
    return found;
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: loader LIBRARY");
        return EXIT_FAILURE;
    }
    struct ibv_device **(*get_device_list)(int *) = find(library, "ibv_get_device_list");
    const char *(*get_device_name)(struct ibv_device *) = find(library, "ibv_get_device_name");
    void (*free_device_list)(struct ibv_device **) = find(library, "ibv_free_device_list");
    struct ibv_device **devices = get_device_list(NULL);
    if (devices == NULL) {
        perror("ibv_get_device_list");
        return EXIT_FAILURE;
    }
    for (struct ibv_device **device = devices; *device != NULL; device++)
        puts(get_device_name(*device));
    free_device_list(devices);
    return EXIT_SUCCESS;
}
