/*
 * cm_talk: a server or a client that connects through librdmacm, and prints each event of the connection manager as a
 * line with its status and private data.
 *
 *   cm_talk server ADDRESS PORT accept|reject COUNT   answers COUNT requests, one after the other
 *   cm_talk client ADDRESS PORT stay|leave|idle       connects once; with "leave" it ends the connection, with "stay"
 *                                                   it waits until the server does, with "idle" until any end
 *
 * A server that has accepted ends the connection itself if the client's private data says "stay".
 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <netdb.h>
#include <rdma/rdma_cma.h>

enum { RESOLVE_MS = 2000, LIMIT_MS = 30000, DATA_BYTES = 40 };

static void fail(const char *call)
{
	printf("failed %s: %s\n", call, strerror(errno));
	exit(1);
}

static void check(int result, const char *call)
{
	if (result != 0)
		fail(call);
}

/* Prints an event. Private data is padded with zeros to the length of the datagram. */
static void print_event(const struct rdma_cm_event *event)
{
	char data[DATA_BYTES + 1] = "";
	size_t length = event->param.conn.private_data_len;

	if (event->param.conn.private_data)
		memcpy(data, event->param.conn.private_data, length < DATA_BYTES ? length : DATA_BYTES);
	printf("%s status %d data \"%s\"\n", rdma_event_str(event->event), event->status, data);
	fflush(stdout);
}

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	check(rdma_create_qp(id, NULL, &init), "rdma_create_qp");
}

static struct rdma_conn_param parameters(const char *data)
{
	struct rdma_conn_param param = {
		.private_data = data,
		.private_data_len = (uint8_t)(strlen(data) + 1),
		.responder_resources = 3,
		.initiator_depth = 2,
		.retry_count = 5,
		.rnr_retry_count = 6,
	};

	return param;
}

static struct rdma_addrinfo *resolve(const char *address, const char *port, int flags)
{
	struct rdma_addrinfo hints = { .ai_flags = flags, .ai_port_space = RDMA_PS_TCP };
	struct rdma_addrinfo *found;

	check(rdma_getaddrinfo(address, port, &hints, &found), "rdma_getaddrinfo");
	return found;
}

/* Waits for the next event of any identifier, copies its fields and acknowledges it. */
static enum rdma_cm_event_type wait_for_event(struct rdma_event_channel *channel, struct rdma_cm_id **id, char *data)
{
	struct pollfd wait = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	enum rdma_cm_event_type type;

	if (poll(&wait, 1, LIMIT_MS) <= 0) {
		errno = ETIMEDOUT;
		fail("waiting for an event");
	}
	check(rdma_get_cm_event(channel, &event), "rdma_get_cm_event");
	print_event(event);
	type = event->event;
	*id = event->id;
	data[0] = 0;
	if (event->param.conn.private_data)
		snprintf(data, DATA_BYTES, "%.*s", event->param.conn.private_data_len,
			 (const char *)event->param.conn.private_data);
	check(rdma_ack_cm_event(event), "rdma_ack_cm_event");
	return type;
}

static void answer_request(struct rdma_cm_id *id, int accepts, const char *data)
{
	struct rdma_conn_param param = parameters("welcome");
	char refusal[] = "not you";
	static char stay[] = "stay";

	if (!accepts) {
		check(rdma_reject(id, refusal, sizeof(refusal)), "rdma_reject");
		check(rdma_destroy_id(id), "rdma_destroy_id");
		return;
	}
	id->context = strcmp(data, stay) == 0 ? stay : NULL;
	make_qp(id);
	check(rdma_accept(id, &param), "rdma_accept");
}

static int serve(struct rdma_event_channel *channel, const char *address, const char *port, int accepts, int count)
{
	struct rdma_addrinfo *found = resolve(address, port, RAI_PASSIVE);
	struct rdma_cm_id *listener, *id;
	char data[DATA_BYTES];

	check(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_bind_addr(listener, found->ai_src_addr), "rdma_bind_addr");
	check(rdma_listen(listener, 8), "rdma_listen");
	printf("listening\n");
	fflush(stdout);
	while (count > 0) {
		switch (wait_for_event(channel, &id, data)) {
		case RDMA_CM_EVENT_CONNECT_REQUEST:
			answer_request(id, accepts, data);
			count -= !accepts;
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			if (id->context)
				check(rdma_disconnect(id), "rdma_disconnect");
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
			rdma_disconnect(id);
			rdma_destroy_qp(id);
			check(rdma_destroy_id(id), "rdma_destroy_id");
			count--;
			break;
		default:
			break;
		}
	}
	return 0;
}

static int connect_once(struct rdma_event_channel *channel, const char *address, const char *port, const char *manner)
{
	struct rdma_addrinfo *found = resolve(address, port, 0);
	struct rdma_conn_param param = parameters(manner);
	struct rdma_cm_id *id, *same;
	char data[DATA_BYTES];

	check(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_resolve_addr(id, NULL, found->ai_dst_addr, RESOLVE_MS), "rdma_resolve_addr");
	for (;;) {
		switch (wait_for_event(channel, &same, data)) {
		case RDMA_CM_EVENT_ADDR_RESOLVED:
			check(rdma_resolve_route(id, RESOLVE_MS), "rdma_resolve_route");
			break;
		case RDMA_CM_EVENT_ROUTE_RESOLVED:
			make_qp(id);
			check(rdma_connect(id, &param), "rdma_connect");
			break;
		case RDMA_CM_EVENT_ESTABLISHED:
			if (strcmp(manner, "leave") == 0)
				check(rdma_disconnect(id), "rdma_disconnect");
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
			rdma_disconnect(id);
			rdma_destroy_qp(id);
			check(rdma_destroy_id(id), "rdma_destroy_id");
			return 0;
		default:
			/* The connection was rejected or timed out; the printed event names the reason. */
			return 0;
		}
	}
}

int main(int argc, char **argv)
{
	struct rdma_event_channel *channel;

	if (argc < 5 || argc != (strcmp(argv[1], "server") == 0 ? 6 : 5)) {
		fprintf(stderr, "usage: cm_talk server ADDRESS PORT accept|reject COUNT | client ADDRESS PORT stay|leave|idle\n");
		return 2;
	}
	channel = rdma_create_event_channel();
	if (!channel)
		fail("rdma_create_event_channel");
	if (strcmp(argv[1], "server") == 0)
		return serve(channel, argv[2], argv[3], strcmp(argv[4], "accept") == 0, atoi(argv[5]));
	return connect_once(channel, argv[2], argv[3], argv[4]);
}
