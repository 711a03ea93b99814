/*
 * faulty.c: makes the given mistake while a region is registered: a write behind the buffer, one to no address, or a
 * buffer that is not freed.
 */
#include <stdlib.h>
#include <string.h>

#include "env.h"

int main(int argc, char **argv)
{
    const char *mistake = argc == 2 ? argv[1] : "";
    struct env env = env_open();
    volatile uint8_t *buffer = malloc(ENV_BYTES);
    /* The compiler must not see the mistake. */
    volatile size_t end = ENV_BYTES;
    if (strcmp(mistake, "overflow") == 0)
        buffer[end] = 1;
    else if (strcmp(mistake, "null") == 0)
        *(volatile uint8_t *)NULL = 1;
    else if (strcmp(mistake, "leak") == 0)
        buffer = NULL;
    free((void *)buffer);
    env_close(&env);
    return EXIT_SUCCESS;
}
