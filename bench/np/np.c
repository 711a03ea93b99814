/*
 * np: the ends of `make bench-np`. A plain verbs program: whether its memory is pinned, paged or ordinary is up to `terrace run`.
 *
 *     np server SOCKET REGION             registers a region and serves it, without any work of its own
 *     np client SOCKET TEST IN OUT        measures; TEST is present, faults, others, buffers or store
 *     np disk FILE BYTES CPU TURNS IN OUT the latency of the disk: reads of 4 KiB at random places of a new file, while CPU is busy
 *     np register REGION                  the time to register and to deregister a region
 *     np control                          times and memory of the control plane
 *
 * REGION is BYTES untouched|filled [FILE]. Without FILE the memory is private; with it, a shared mapping of a new file, registered for
 * on-demand paging. Between the pipes IN and OUT a program takes its turns.
 *
 * Build:  make build/bench/np/np
 */
#include "np.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    void (*measure)(struct client *client);
} TESTS[] = {
    {"present", measure_present},
    {"faults", measure_faults},
    {"others", measure_others},
    {"buffers", measure_buffers},
    {"store", measure_store},
};

static noreturn void usage(void)
{
    fprintf(stderr, "usage: np server SOCKET REGION | client SOCKET TEST IN OUT | disk FILE BYTES CPU TURNS IN OUT | register REGION | control; "
                    "REGION: BYTES untouched|filled [FILE]\n");
    exit(2);
}

static struct region parse_region(char **words, int count)
{
    if (count < 2 || count > 3)
        usage();
    return (struct region){
        .bytes = strtoull(words[0], NULL, 0), .is_filled = strcmp(words[1], "filled") == 0, .file = count == 3 ? words[2] : NULL};
}

static void run_client(const char *socket_path, const char *name)
{
    for (size_t i = 0; i < sizeof TESTS / sizeof TESTS[0]; i++) {
        if (strcmp(TESTS[i].name, name) == 0) {
            struct client client;
            connect_client(socket_path, &client);
            TESTS[i].measure(&client);
            return;
        }
    }
    usage();
}

int main(int argc, char **argv)
{
    const char *role = argc > 1 ? argv[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(role, "server") == 0 && argc > 3) {
        struct region region = parse_region(argv + 3, argc - 3);
        serve(argv[2], &region);
    } else if (strcmp(role, "client") == 0 && argc == 6) {
        take_turns(argv[4], argv[5]);
        run_client(argv[2], argv[3]);
    } else if (strcmp(role, "disk") == 0 && argc == 8) {
        take_turns(argv[6], argv[7]);
        measure_disk(argv[2], strtoull(argv[3], NULL, 0), atoi(argv[4]), (unsigned)atoi(argv[5]));
    } else if (strcmp(role, "register") == 0) {
        struct region region = parse_region(argv + 2, argc - 2);
        measure_registration(&region);
    } else if (strcmp(role, "control") == 0) {
        measure_control();
    } else {
        usage();
    }
    return 0;
}
