/*
 * np: the ends of `make bench-np`. A plain verbs program: whether its memory is pinned, paged or ordinary is up to `terrace run`.
 *
 *     np server SOCKET REGION          registers a region and serves it, without any work of its own
 *     np client SOCKET TEST            measures; TEST is present, first-touches, absent or others
 *     np register REGION               the time to register and to deregister a region
 *     np disk FILE BYTES               the latency of the disk: reads of 4 KiB at random places of a new file
 *
 * REGION is BYTES untouched|filled [FILE]. Without FILE the memory is private; with it, a shared mapping of a new file, registered for
 * on-demand paging.
 *
 * Build:  make build/bench/np/np
 */
#include "np.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../peers/clock.h"

static const struct {
    const char *name;
    void (*measure)(struct client *client);
} TESTS[] = {
    {"present", measure_present},
    {"first-touches", measure_first_touches},
    {"absent", measure_absent},
    {"others", measure_others},
};

static noreturn void usage(void)
{
    fprintf(stderr, "usage: np server SOCKET REGION | client SOCKET TEST | register REGION | disk FILE BYTES; REGION: BYTES untouched|filled [FILE]\n");
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
    const char *role = argc > 2 ? argv[1] : "";
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (strcmp(role, "server") == 0) {
        struct region region = parse_region(argv + 3, argc - 3);
        serve(argv[2], &region);
    } else if (strcmp(role, "client") == 0 && argc == 4) {
        run_client(argv[2], argv[3]);
    } else if (strcmp(role, "register") == 0) {
        struct region region = parse_region(argv + 2, argc - 2);
        register_region(&region);
    } else if (strcmp(role, "disk") == 0 && argc == 4) {
        measure_disk(argv[2], strtoull(argv[3], NULL, 0));
    } else {
        usage();
    }
    return 0;
}
