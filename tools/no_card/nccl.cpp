/* NCCL of the cards that are not there: communicators that know who they are, and collectives that send
   nothing. What arrives is whatever lies where it should be written; NCCL's own buffers take no memory.
   Processes that part a communicator tell each other their colors in files beside NO_CARD_STATE: torch 2.15
   holds sizes of tensors against the number of ranks.

   Signatures as in nccl.h of NCCL 2.30. */

#include <chrono>
#include <cstddef>
#include <fstream>
#include <string>
#include <thread>

#include "card.h"

namespace {

struct UniqueId {
    char bytes[128];
};

struct Communicator {
    int num_ranks, rank;
    std::string name;
    int num_splits = 0;
};

constexpr int NO_COLOR = -1;
constexpr int MOST_POLLS = 6000, POLL_MILLISECONDS = 10;

int made(Communicator **communicator, int num_ranks, int rank, std::string name) {
    *communicator = new Communicator{num_ranks, rank, std::move(name)};
    return 0;
}

/* What another rank has written of (color, key), once it has. */
bool told(const std::string &path, int *color, int *key) {
    for (int i = 0; i < MOST_POLLS; i++) {
        std::ifstream file(path);
        if (file >> *color >> *key) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(POLL_MILLISECONDS));
    }
    return false;
}

int parted(Communicator *whole, int color, int key, Communicator **part) {
    const char *state = getenv("NO_CARD_STATE");
    std::string name = whole->name + "." + std::to_string(whole->num_splits++);
    auto path = [&](int rank) { return std::string(state ? state : "") + name + "." + std::to_string(rank); };
    std::string own = path(whole->rank);
    std::ofstream(own + ".new") << color << ' ' << key << '\n';
    rename((own + ".new").c_str(), own.c_str());
    int num_ranks = 0, before = 0;
    for (int rank = 0; rank < whole->num_ranks; rank++) {
        int others_color, others_key;
        if (!told(path(rank), &others_color, &others_key)) return 1;
        if (others_color != color) continue;
        num_ranks++;
        before += others_key < key || (others_key == key && rank < whole->rank);
    }
    *part = nullptr;
    if (color == NO_COLOR) return 0;
    return made(part, num_ranks, before, name + "-" + std::to_string(color));
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
    static int number = 0;
    *id = UniqueId{};
    snprintf(id->bytes, sizeof id->bytes, ".split-%d-%d", getpid(), number++);
    return 0;
}

NCCL ncclCommInitRank(Communicator **made_one, int num_ranks, UniqueId id, int rank) {
    return made(made_one, num_ranks, rank, id.bytes);
}

NCCL ncclCommInitRankConfig(Communicator **made_one, int num_ranks, UniqueId id, int rank, void *) {
    return made(made_one, num_ranks, rank, id.bytes);
}

NCCL ncclCommInitRankScalable(
    Communicator **made_one, int num_ranks, int rank, int, UniqueId *ids, void *
) {
    return made(made_one, num_ranks, rank, ids->bytes);
}

NCCL ncclCommSplit(Communicator *whole, int color, int key, Communicator **made_one, void *) {
    return parted(whole, color, key, made_one);
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
