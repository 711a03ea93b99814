/*
 * mad: sends one management datagram from queue pair 1 of the kernel's first RDMA device, and prints the answer.
 *
 *     mad ADDRESS GID-INDEX HEX
 *
 * HEX is the datagram, of which the kernel changes the upper half of the transaction id (bytes 8 to 11). The program
 * prints the answer in the same format.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <rdma/ib_user_mad.h>
#include <rdma/rdma_user_ioctl.h>

enum { MAD_BYTES = 256, TIMEOUT_MS = 500, RETRIES = 9 };

static const unsigned long QKEY_OF_MANAGEMENT = 0x80010000;

struct umad {
    struct ib_user_mad_hdr head;
    unsigned char data[MAD_BYTES];
};

static void die(const char *message)
{
    fprintf(stderr, "mad: %s (errno: %s)\n", message, strerror(errno));
    exit(2);
}

static void address_to_gid(const char *address, unsigned char *gid)
{
    gid[10] = gid[11] = 0xff;
    if (inet_pton(AF_INET, address, gid + 12) != 1 && inet_pton(AF_INET6, address, gid) != 1)
        die("no address");
}

static unsigned register_agent(int fd)
{
    struct ib_user_mad_reg_req request = {.qpn = 1};
    unsigned on = 1;
    if (ioctl(fd, IB_USER_MAD_ENABLE_PKEY, &on) != 0 || ioctl(fd, IB_USER_MAD_REGISTER_AGENT, &request) != 0)
        die("the kernel registers no agent");
    return request.id;
}

int main(int argc, char **argv)
{
    struct umad mad = {.head = {.timeout_ms = TIMEOUT_MS, .retries = RETRIES, .grh_present = 1, .hop_limit = 64}};
    unsigned value;
    if (argc != 4)
        die("usage: mad ADDRESS GID-INDEX HEX");
    for (size_t i = 0; i < MAD_BYTES && sscanf(argv[3] + 2 * i, "%2x", &value) == 1; i++)
        mad.data[i] = (unsigned char)value;
    int fd = open("/dev/infiniband/umad0", O_RDWR);
    if (fd < 0)
        die("/dev/infiniband/umad0");
    mad.head.id = register_agent(fd);
    mad.head.qpn = htonl(1), mad.head.qkey = htonl(QKEY_OF_MANAGEMENT);
    mad.head.gid_index = (unsigned char)atoi(argv[2]);
    address_to_gid(argv[1], mad.head.gid);
    if (write(fd, &mad, sizeof mad) != sizeof mad)
        die("the datagram is not sent");
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    if (poll(&waiting, 1, TIMEOUT_MS * (RETRIES + 2)) != 1 || read(fd, &mad, sizeof mad) <= 0)
        die("no answer in time");
    if (mad.head.status != 0)
        errno = (int)mad.head.status, die("the kernel could not deliver the datagram");
    for (int i = 0; i < MAD_BYTES; i++)
        printf("%02x", mad.data[i]);
    puts("");
    return 0;
}
