/* NCCL of the cards that are not there: communicators that know who they are, and collectives that send
   nothing. What arrives is whatever lies where it should be written; NCCL's own buffers take no memory.

   Signatures as in nccl.h of NCCL 2.30. */

#include <cstddef>

#include "card.h"

namespace {

struct UniqueId {
    char bytes[128];
};

struct Communicator {
    int num_ranks, rank;
};

int made(Communicator **communicator, int num_ranks, int rank) {
    *communicator = new Communicator{num_ranks, rank};
    return 0;
}

}  // namespace

#define NCCL EXPORTED int

NCCL ncclGetVersion(int *version) {
    *version = 23007;
    return 0;
}

EXPORTED const char *ncclGetErrorString(int) { return "no card"; }
EXPORTED const char *ncclGetLastError(Communicator *) { return ""; }

NCCL ncclGetUniqueId(UniqueId *id) {
    *id = UniqueId{};
    return 0;
}

NCCL ncclCommInitRank(Communicator **made_one, int num_ranks, UniqueId, int rank) {
    return made(made_one, num_ranks, rank);
}

NCCL ncclCommInitRankConfig(Communicator **made_one, int num_ranks, UniqueId, int rank, void *) {
    return made(made_one, num_ranks, rank);
}

NCCL ncclCommInitRankScalable(
    Communicator **made_one, int num_ranks, int rank, int, UniqueId *, void *
) {
    return made(made_one, num_ranks, rank);
}

NCCL ncclCommSplit(Communicator *whole, int, int, Communicator **made_one, void *) {
    return made(made_one, whole->num_ranks, whole->rank);
}

NCCL ncclCommCount(const Communicator *communicator, int *count) {
    *count = communicator->num_ranks;
    return 0;
}

NCCL ncclCommUserRank(const Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

NCCL ncclCommGetAsyncError(Communicator *, int *error) {
    *error = 0;
    return 0;
}

NCCL ncclRedOpCreatePreMulSum(int *operation, void *, int, int, Communicator *) {
    *operation = 0;
    return 0;
}

#define DOES_NOTHING(name) \
    NCCL name(void *, ...) { return 0; }

DOES_NOTHING(ncclAllGather)
DOES_NOTHING(ncclAllReduce)
DOES_NOTHING(ncclAlltoAll)
DOES_NOTHING(ncclBcast)
DOES_NOTHING(ncclBroadcast)
DOES_NOTHING(ncclCommAbort)
DOES_NOTHING(ncclCommDeregister)
DOES_NOTHING(ncclCommDestroy)
DOES_NOTHING(ncclCommFinalize)
DOES_NOTHING(ncclRecv)
DOES_NOTHING(ncclRedOpDestroy)
DOES_NOTHING(ncclReduce)
DOES_NOTHING(ncclReduceScatter)
DOES_NOTHING(ncclSend)

NCCL ncclCommRegister(Communicator *, void *, size_t, void **handle) {
    *handle = nullptr;
    return 0;
}

NCCL ncclGroupStart() { return 0; }
NCCL ncclGroupEnd() { return 0; }
