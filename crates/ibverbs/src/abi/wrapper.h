/* What regenerate.sh reads: the verbs, and the kernel's structures that librdmacm passes through libibverbs. */
#include <infiniband/verbs.h>
#include <infiniband/sa.h>
#include <rdma/ib_user_verbs.h>
#include <rdma/ib_user_sa.h>
