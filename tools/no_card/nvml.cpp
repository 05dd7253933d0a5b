/* libnvidia-ml.so.1 of the cards that are not there: what autotune and PyTorch ask of NVML.

   Structures as in nvml.h of CUDA 13.0. */

#include <cstdint>

#include "card.h"

namespace {

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

struct Memory {
    unsigned long long total, free, used;
};

struct Memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

struct FabricInfo_v2 {
    unsigned version;
    unsigned char cluster_uuid[16];
    unsigned status, clique_id;
    unsigned char state;
};

struct ProcessInfo {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

/* A card's handle is its number and 1. */
void *handle_of(unsigned index) { return (void *)(uintptr_t)(index + 1); }
int index_of(void *handle) { return (int)(uintptr_t)handle - 1; }

int text(char *to, unsigned size, const char *words) {
    return snprintf(to, size, "%s", words) < (int)size ? SUCCESS : INSUFFICIENT_SIZE;
}

}  // namespace

#define NVML EXPORTED int

NVML nvmlInit_v2() { return SUCCESS; }
NVML nvmlInitWithFlags(unsigned) { return SUCCESS; }
NVML nvmlShutdown() { return SUCCESS; }

EXPORTED const char *nvmlErrorString(int error) {
    return error == NOT_SUPPORTED ? "Not Supported" : "Unknown Error";
}

NVML nvmlSystemGetDriverVersion(char *to, unsigned size) { return text(to, size, "no card"); }

NVML nvmlSystemGetCudaDriverVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

NVML nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

NVML nvmlSystemGetProcessName(unsigned pid, char *to, unsigned size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    bool has_read = fgets(to, (int)size, file) != nullptr;
    fclose(file);
    if (!has_read) return NOT_FOUND;
    to[strcspn(to, "\n")] = 0;
    return SUCCESS;
}

NVML nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)card::num_cards;
    return SUCCESS;
}

NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = handle_of(index);
    return index < (unsigned)card::num_cards ? SUCCESS : INVALID_ARGUMENT;
}

NVML nvmlDeviceGetHandleByPciBusId_v2(const char *words, void **handle) {
    unsigned domain, bus = 0;
    if (sscanf(words, "%x:%x", &domain, &bus) != 2 || !bus) return INVALID_ARGUMENT;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

NVML nvmlDeviceGetHandleByUUID(const char *words, void **handle) {
    const char *last = strrchr(words, '-');
    return nvmlDeviceGetHandleByIndex_v2(last ? (unsigned)strtoul(last + 1, nullptr, 16) - 1 : 0, handle);
}

NVML nvmlDeviceGetName(void *, char *to, unsigned size) { return text(to, size, card::name()); }

NVML nvmlDeviceGetUUID(void *handle, char *to, unsigned size) {
    char words[64];
    snprintf(words, sizeof words, "GPU-00000000-0000-0000-0000-%012x", index_of(handle) + 1);
    return text(to, size, words);
}

NVML nvmlDeviceGetCudaComputeCapability(void *, int *major, int *minor) {
    *major = card::capability / 10;
    *minor = card::capability % 10;
    return SUCCESS;
}

NVML nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    memory->total = card::total_bytes + card::driver_bytes;
    memory->used = card::used_bytes(index_of(handle)) + card::driver_bytes;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

NVML nvmlDeviceGetMemoryInfo_v2(void *handle, Memory_v2 *memory) {
    memory->total = card::total_bytes + card::driver_bytes;
    memory->reserved = card::driver_bytes;
    memory->used = card::used_bytes(index_of(handle));
    memory->free = card::total_bytes - memory->used;
    return SUCCESS;
}

NVML nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *infos) {
    int device = index_of(handle);
    unsigned space = infos ? *count : 0, found = 0;
    for (int i = 0; i < card::MOST_PROCESSES; i++) {
        const card::Process &process = card::processes()[i];
        if (!process.pid || !process.bytes[device] || !card::is_alive(process.pid)) continue;
        if (found < space) infos[found] = {(unsigned)process.pid, process.bytes[device], ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > space ? INSUFFICIENT_SIZE : SUCCESS;
}

NVML nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, ProcessInfo *infos) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, infos);
}

NVML nvmlDeviceGetGraphicsRunningProcesses_v3(void *, unsigned *count, ProcessInfo *) {
    *count = 0;
    return SUCCESS;
}

NVML nvmlDeviceGetCurrentClocksEventReasons(void *, unsigned long long *reasons) {
    *reasons = 0;
    return SUCCESS;
}

NVML nvmlDeviceGetMigMode(void *, unsigned *, unsigned *) { return NOT_SUPPORTED; }
NVML nvmlDeviceGetEnforcedPowerLimit(void *, unsigned *) { return NOT_SUPPORTED; }
NVML nvmlDeviceGetPowerManagementDefaultLimit(void *, unsigned *) { return NOT_SUPPORTED; }

/* PyTorch asks before it makes expandable segments, and does not go on without an answer. */
NVML nvmlDeviceGetGpuFabricInfoV(void *, FabricInfo_v2 *info) {
    info->state = 0; /* NVML_GPU_FABRIC_STATE_NOT_SUPPORTED */
    return SUCCESS;
}

NVML nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, void *) { return NOT_SUPPORTED; }
NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return NOT_SUPPORTED; }
