/* The CUDA runtime and driver of cards that are not there: memory is counted, and nothing is computed.

   PyTorch's CUDA build runs on it as on a card: its choice of kernels, its autograd and autocast, its
   caching allocator. A kernel that is launched does nothing, so tensors hold whatever their memory held.
   A single value that is read back is always one (true, 1 or 1.0): masks are full, losses finite. What
   Tensor.all() says may be no instead, as where a batch is padded. As many elements of a tensor are not
   zero as it has.
   Memory that was not written costs the host nothing. Events tell the host's time.

   As on a card: the driver does not survive a fork, memory comes in whole pages of 2 MiB and may run out,
   a process that ends gives back what it held. Managed memory is not counted. Streams do not overlap. */

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <time.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "card.h"

namespace {

using card::MIB;
constexpr size_t PAGE = 2 * MIB;
constexpr size_t MOST_COPIED = 64 * MIB;
constexpr size_t REGION = (size_t)16 << 40;

int driver_pid = 0;                /* who called cuInit, in this process or in one that it was forked from */
card::Process *process = nullptr;  /* the context of this process */
bool has_context[card::MOST_CARDS];  /* on which cards */
thread_local int current = 0;        /* number of the card that this thread uses */
thread_local cudaError_t last_error = cudaSuccess;
bool is_capturing = false;

/* Kernels that ask whether all are so, and whether the last that was launched is one: Tensor.all() (torch's
   ReduceLogicKernel.cu), and equality (CompareEQKernel.cu), as Transformers compares a sum with their number. */
std::set<const void *> kernels_of_all;
thread_local bool asks_of_all = false;

struct Block {
    size_t bytes;
    bool is_counted;
    int device;
};
std::mutex blocks_mutex;
std::map<uintptr_t, Block> blocks;

cudaError_t said(cudaError_t error) {
    if (error) last_error = error;
    return error;
}

cudaError_t initialize() {
    if (card::is_hidden()) return cudaErrorNoDevice;
    if (!driver_pid) driver_pid = getpid();
    return driver_pid == getpid() ? cudaSuccess : cudaErrorInitializationError;
}

bool is_initialized() { return driver_pid == getpid(); }

bool take(size_t bytes, int device) {
    if (card::used_bytes(device) + bytes > card::total_bytes) return false;
    __atomic_add_fetch(&process->bytes[device], bytes, __ATOMIC_SEQ_CST);
    return true;
}

void give_back(size_t bytes, int device) { __atomic_sub_fetch(&process->bytes[device], bytes, __ATOMIC_SEQ_CST); }

cudaError_t make_context() {
    if (cudaError_t error = initialize()) return error;
    if (process && has_context[current]) return cudaSuccess;
    std::lock_guard<std::mutex> guard(blocks_mutex);
    if (card::used_bytes(current) + card::context_bytes > card::total_bytes) return cudaErrorMemoryAllocation;
    if (!process) process = card::enter();
    if (has_context[current]) return cudaSuccess;
    has_context[current] = true;
    __atomic_add_fetch(&process->bytes[current], card::context_bytes, __ATOMIC_SEQ_CST);
    return cudaSuccess;
}

bool is_device(int device) { return device >= 0 && device < card::num_cards; }

uintptr_t whole_pages(uintptr_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Address space; the host's memory behind it is taken only where somebody writes. */
void *address_space(size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void *start = mmap(nullptr, bytes + PAGE, PROT_NONE, flags, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    madvise(start, bytes + PAGE, MADV_NOHUGEPAGE);
    return (void *)whole_pages((uintptr_t)start);
}

void forget(void *start, size_t bytes) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    mmap(start, bytes, PROT_NONE, flags, -1, 0);
    madvise(start, bytes, MADV_NOHUGEPAGE);
}

/* The highest gap of one large region, so that what comes later lies lower, as on cards
   (studies/published-t4). */
uintptr_t place(size_t bytes) {
    static const uintptr_t region = (uintptr_t)address_space(REGION);
    uintptr_t top = region + REGION;
    for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) {
        const auto &[start, block] = *it;
        if (start < region || start >= region + REGION) continue;
        if (top - (start + block.bytes) >= bytes) break;
        top = start;
    }
    return region && top - region >= bytes ? top - bytes : 0;
}

cudaError_t allocate(void **to, size_t bytes, bool is_counted) {
    *to = nullptr;
    if (!bytes) return cudaSuccess;
    bytes = whole_pages(bytes);
    if (is_counted && !take(bytes, current)) return cudaErrorMemoryAllocation;
    std::lock_guard<std::mutex> guard(blocks_mutex);
    *to = (void *)place(bytes);
    if (!*to || mprotect(*to, bytes, PROT_READ | PROT_WRITE)) return cudaErrorMemoryAllocation;
    blocks[(uintptr_t)*to] = {bytes, is_counted, current};
    return cudaSuccess;
}

/* The number of the card whose memory it is; -1: of none. */
int device_of(const void *pointer) {
    std::lock_guard<std::mutex> guard(blocks_mutex);
    auto after = blocks.upper_bound((uintptr_t)pointer);
    if (after == blocks.begin()) return -1;
    auto block = std::prev(after);
    return (uintptr_t)pointer < block->first + block->second.bytes ? block->second.device : -1;
}

bool is_on_card(const void *pointer) { return device_of(pointer) >= 0; }

/* PyTorch counts what is not zero by a sum of cub's over NonZeroOp, of arguments (from, to, number of
   elements, ...), and reads the count back (torch 2.13 aten/src/ATen/native/cuda/Nonzero.cu). */
std::set<const void *> &counting_kernels() {
    static std::set<const void *> functions;
    return functions;
}
thread_local uint32_t num_counted = 0;

void note_launch(const void *function, void **arguments) {
    if (arguments && counting_kernels().count(function)) num_counted = *(uint32_t *)arguments[2];
}

/* One, in as many bytes as are asked for. */
bool write_one(void *to, size_t bytes) {
    const uint16_t bfloat16_one = 0x3f80;
    const float float_one = 1;
    const int64_t integer_one = 1;
    switch (bytes) {
        case 1: *(uint8_t *)to = asks_of_all ? card::all : 1; return true;
        case 2: memcpy(to, &bfloat16_one, 2); return true;
        case 4: memcpy(to, &float_one, 4); return true;
        case 8: memcpy(to, &integer_one, 8); return true;
        default: return false;
    }
}

void copy(void *to, const void *from, size_t bytes) {
    bool is_from_card = is_on_card(from);
    if (is_from_card && num_counted && bytes == sizeof num_counted && !is_on_card(to)) {
        memcpy(to, &num_counted, bytes);
        num_counted = 0;
        return;
    }
    if (is_from_card && (is_on_card(to) || write_one(to, bytes))) return;
    if (bytes <= MOST_COPIED) memcpy(to, from, bytes);
}

void fill(void *to, int value, size_t bytes) {
    if (bytes <= MIB) memset(to, value, bytes);
}

int64_t nanoseconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

template <typename T>
void make(T *handle) {
    *handle = (T)calloc(1, 64);
}

/* By compute capability: shared memory that a block may ask for, and threads of a multiprocessor
   (CUDA C++ Programming Guide 13.0, "Technical Specifications per Compute Capability"). */
struct Limits {
    int capability, block_shared_bytes, num_threads;
};
const Limits LIMITS[] = {
    {75, 65536, 1024},  {80, 166912, 2048},  {86, 101376, 1536},  {89, 101376, 1536},
    {90, 232448, 2048}, {100, 232448, 2048}, {120, 101376, 1536},
};

const Limits &limits() {
    for (const Limits &row : LIMITS)
        if (row.capability == card::capability) return row;
    return LIMITS[1];
}

/* Of the card's own generation the nearest that PyTorch brings kernels for: torch.cuda.get_arch_list() of
   2.13.0+cu130. cub looks for its policy under what a kernel was compiled for, and fails where none is. */
int kernel_capability() {
    int nearest = card::capability;
    for (int compiled : {75, 80, 86, 90, 100, 120})
        if (compiled <= card::capability && compiled / 10 == card::capability / 10) nearest = compiled;
    return nearest;
}

int attribute(int which) {
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return card::capability / 10;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return card::capability % 10;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return card::num_sms;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return limits().block_shared_bytes;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return limits().block_shared_bytes + 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return limits().num_threads;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return (int)card::l2_bytes;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 1000000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT: return 512;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED: return 1;
        default: return 0;
    }
}

}  // namespace

#define RUNTIME EXPORTED cudaError_t
#define IN_CONTEXT \
    if (cudaError_t error = make_context()) return said(error)
#define INITIALIZED \
    if (cudaError_t error = initialize()) return said(error)

/* Kernels: registered by the libraries that bring them, launched in vain. */

EXPORTED void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void **) {}
EXPORTED void __cudaUnregisterFatBinary(void **) {}
EXPORTED void __cudaRegisterFunction(
    void **, const char *function, char *, const char *name, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
    if (strstr(name, "NonZeroOp") && strstr(name, "DeviceReduce")) counting_kernels().insert(function);
    if (strstr(name, "and_kernel_cuda") || strstr(name, "CompareEqFunctor")) kernels_of_all.insert(function);
}
EXPORTED void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }

RUNTIME __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
    *grid = *block = dim3{1, 1, 1};
    *shared_bytes = 0;
    *(void **)stream = nullptr;
    return cudaSuccess;
}

RUNTIME __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

RUNTIME cudaLaunchKernel(const void *function, dim3, dim3, void **arguments, size_t, cudaStream_t) {
    IN_CONTEXT;
    note_launch(function, arguments);
    asks_of_all = kernels_of_all.count(function);
    return cudaSuccess;
}

/* __cudaGetKernel gives the function itself. */
RUNTIME __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t bytes, cudaStream_t stream) {
    return cudaLaunchKernel((const void *)kernel, grid, block, arguments, bytes, stream);
}

RUNTIME cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *function, void **arguments) {
    IN_CONTEXT;
    note_launch(function, arguments);
    return cudaSuccess;
}

RUNTIME cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

RUNTIME cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    IN_CONTEXT;
    *attributes = {};
    attributes->binaryVersion = attributes->ptxVersion = kernel_capability();
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 64;
    attributes->maxDynamicSharedSizeBytes = 49152;
    return cudaSuccess;
}

RUNTIME cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *num_blocks, const void *, int num_threads, size_t, unsigned) {
    IN_CONTEXT;
    *num_blocks = num_threads > limits().num_threads / 2 ? 1 : 2;
    return cudaSuccess;
}

RUNTIME cudaGetSymbolAddress(void **address, const void *) {
    IN_CONTEXT;
    static char symbols[MIB];
    *address = symbols;
    return cudaSuccess;
}

RUNTIME cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    IN_CONTEXT;
    return cudaSuccess;
}

/* The card. */

RUNTIME cudaGetDeviceCount(int *count) {
    *count = 0;
    INITIALIZED;
    *count = card::num_visible();
    return cudaSuccess;
}

RUNTIME cudaGetDevice(int *device) {
    INITIALIZED;
    *device = current;
    return cudaSuccess;
}

RUNTIME cudaSetDevice(int device) {
    if (!is_device(device)) return said(cudaErrorInvalidDevice);
    current = device;
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaDeviceSynchronize() {
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

RUNTIME cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

RUNTIME cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    INITIALIZED;
    *value = attribute(which);
    return cudaSuccess;
}

RUNTIME cudaGetDeviceProperties(cudaDeviceProp *properties, int device) {
    INITIALIZED;
    *properties = {};
    snprintf(properties->name, sizeof properties->name, "%s", card::name());
    properties->uuid.bytes[15] = (char)(device + 1);
    properties->pciBusID = device + 1;
    properties->totalGlobalMem = card::total_bytes;
    properties->major = card::capability / 10;
    properties->minor = card::capability % 10;
    properties->multiProcessorCount = card::num_sms;
    properties->sharedMemPerBlock = 49152;
    properties->sharedMemPerBlockOptin = limits().block_shared_bytes;
    properties->sharedMemPerMultiprocessor = limits().block_shared_bytes + 1024;
    properties->reservedSharedMemPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = limits().num_threads;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
    properties->maxThreadsDim[2] = 64;
    properties->maxGridSize[0] = 2147483647;
    properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
    properties->memPitch = 2147483647;
    properties->totalConstMem = 65536;
    properties->textureAlignment = 512;
    properties->l2CacheSize = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
    properties->memoryBusWidth = attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH);
    properties->asyncEngineCount = 2;
    properties->unifiedAddressing = properties->managedMemory = properties->concurrentManagedAccess = 1;
    properties->pageableMemoryAccess = properties->memoryPoolsSupported = 1;
    properties->concurrentKernels = properties->cooperativeLaunch = properties->streamPrioritiesSupported = 1;
    return cudaSuccess;
}

RUNTIME cudaDeviceGetPCIBusId(char *to, int size, int device) {
    snprintf(to, (size_t)size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

RUNTIME cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    IN_CONTEXT;
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

RUNTIME cudaDeviceCanAccessPeer(int *can, int, int) {
    *can = 0;
    return cudaSuccess;
}

RUNTIME cudaGetLastError() {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

RUNTIME cudaPeekAtLastError() { return last_error; }

EXPORTED const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInitializationError: return "initialization error";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        default: return "an error that only a card explains";
    }
}

EXPORTED const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorInitializationError: return "cudaErrorInitializationError";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        default: return "cudaErrorUnknown";
    }
}

/* Memory. */

RUNTIME cudaMalloc(void **to, size_t bytes) {
    IN_CONTEXT;
    return said(allocate(to, bytes, true));
}

RUNTIME cudaMallocAsync(void **to, size_t bytes, cudaStream_t) { return cudaMalloc(to, bytes); }

RUNTIME cudaMallocManaged(void **to, size_t bytes, unsigned) {
    IN_CONTEXT;
    return said(allocate(to, bytes, false));
}

RUNTIME cudaFree(void *pointer) {
    IN_CONTEXT;
    if (!pointer) return cudaSuccess;
    std::lock_guard<std::mutex> guard(blocks_mutex);
    auto block = blocks.find((uintptr_t)pointer);
    if (block == blocks.end()) return said(cudaErrorInvalidValue);
    forget(pointer, block->second.bytes);
    if (block->second.is_counted) give_back(block->second.bytes, block->second.device);
    blocks.erase(block);
    return cudaSuccess;
}

RUNTIME cudaFreeAsync(void *pointer, cudaStream_t) { return cudaFree(pointer); }

namespace {

std::mutex pinning;
std::map<uintptr_t, size_t> pinned; /* Bytes by address. */

bool is_pinned(const void *pointer) {
    std::lock_guard<std::mutex> lock(pinning);
    auto after = pinned.upper_bound((uintptr_t)pointer);
    if (after == pinned.begin()) return false;
    --after;
    return (uintptr_t)pointer < after->first + after->second;
}

}  // namespace

RUNTIME cudaHostAlloc(void **to, size_t bytes, unsigned) {
    IN_CONTEXT;
    if (posix_memalign(to, 4096, bytes ? bytes : 1)) return said(cudaErrorMemoryAllocation);
    std::lock_guard<std::mutex> lock(pinning);
    pinned[(uintptr_t)*to] = bytes;
    return cudaSuccess;
}

RUNTIME cudaFreeHost(void *pointer) {
    {
        std::lock_guard<std::mutex> lock(pinning);
        pinned.erase((uintptr_t)pointer);
    }
    free(pointer);
    return cudaSuccess;
}

RUNTIME cudaHostRegister(void *, size_t, unsigned) {
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaHostUnregister(void *) { return cudaSuccess; }

RUNTIME cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    IN_CONTEXT;
    *total_bytes = card::total_bytes;
    *free_bytes = card::total_bytes - card::used_bytes(current);
    return cudaSuccess;
}

RUNTIME cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    IN_CONTEXT;
    copy(to, from, bytes);
    return cudaSuccess;
}

RUNTIME cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

RUNTIME cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}

RUNTIME cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    IN_CONTEXT;
    fill(to, value, bytes);
    return cudaSuccess;
}

RUNTIME cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, nullptr); }

RUNTIME cudaMemPrefetchAsync(const void *, size_t, cudaMemLocation, unsigned, cudaStream_t) {
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    *attributes = {};
    int device = device_of(pointer);
    bool is_ours = device >= 0;
    attributes->device = is_ours ? device : 0;
    attributes->type = is_ours              ? cudaMemoryTypeDevice
                       : is_pinned(pointer) ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
    attributes->devicePointer = is_ours ? const_cast<void *>(pointer) : nullptr;
    return cudaSuccess;
}

/* Streams and events. */

RUNTIME cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) {
    IN_CONTEXT;
    make(stream);
    return cudaSuccess;
}

RUNTIME cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
RUNTIME cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
RUNTIME cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
RUNTIME cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

RUNTIME cudaStreamSynchronize(cudaStream_t) {
    IN_CONTEXT;
    return cudaSuccess;
}

RUNTIME cudaStreamGetPriority(cudaStream_t, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

RUNTIME cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned) {
    function(stream, cudaSuccess, data);
    return cudaSuccess;
}

RUNTIME cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    IN_CONTEXT;
    make(event);
    return cudaSuccess;
}

RUNTIME cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }

RUNTIME cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}

RUNTIME cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
RUNTIME cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

RUNTIME cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
    *(int64_t *)event = nanoseconds();
    return cudaSuccess;
}

RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return cudaEventRecordWithFlags(event, stream, 0);
}

RUNTIME cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
    *milliseconds = (float)(*(int64_t *)last - *(int64_t *)first) * 1e-6f;
    return cudaSuccess;
}

/* Graphs: one capture at a time. */

static cudaStreamCaptureStatus capture_status() {
    return is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

RUNTIME cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = capture_status();
    return cudaSuccess;
}

RUNTIME cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    IN_CONTEXT;
    is_capturing = true;
    return cudaSuccess;
}

RUNTIME cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
    is_capturing = false;
    make(graph);
    return cudaSuccess;
}

RUNTIME cudaStreamGetCaptureInfo(
    cudaStream_t,
    cudaStreamCaptureStatus *status,
    unsigned long long *id,
    cudaGraph_t *graph,
    const cudaGraphNode_t **dependencies,
    const cudaGraphEdgeData **edges,
    size_t *num_dependencies) {
    *status = capture_status();
    if (id) *id = 1;
    if (graph) *graph = nullptr;
    if (dependencies) *dependencies = nullptr;
    if (edges) *edges = nullptr;
    if (num_dependencies) *num_dependencies = 0;
    return cudaSuccess;
}

RUNTIME cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t, unsigned long long) {
    make(executable);
    return cudaSuccess;
}

RUNTIME cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *num_nodes) {
    *num_nodes = 1;
    return cudaSuccess;
}

RUNTIME cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
RUNTIME cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
RUNTIME cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
RUNTIME cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }

/* The driver. */

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

RUNTIME cudaGetDriverEntryPointByVersion(
    const char *name, void **function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult *result) {
    *function = dlsym(RTLD_DEFAULT, name);
    /* PyTorch looks up all that it knows at once, and does not go on where one is missing. */
    if (!*function) *function = (void *)not_supported;
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

#define DRIVER EXPORTED CUresult
#define DRIVER_IN_CONTEXT \
    if (make_context()) return CUDA_ERROR_OUT_OF_MEMORY
#define DRIVER_INITIALIZED \
    if (!is_initialized()) return CUDA_ERROR_NOT_INITIALIZED

DRIVER cuInit(unsigned) { return (CUresult)initialize(); }

DRIVER cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

DRIVER cuDeviceGet(CUdevice *device, int number) {
    DRIVER_INITIALIZED;
    if (!is_device(number)) return CUDA_ERROR_INVALID_DEVICE;
    *device = number;
    return CUDA_SUCCESS;
}

DRIVER cuDeviceGetCount(int *count) {
    DRIVER_INITIALIZED;
    *count = card::num_visible();
    return CUDA_SUCCESS;
}

DRIVER cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
    DRIVER_INITIALIZED;
    *value = attribute(which);
    return CUDA_SUCCESS;
}

DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    DRIVER_INITIALIZED;
    *flags = 0;
    *is_active = process && has_context[device];
    return CUDA_SUCCESS;
}

/* A context is the address of its card's mark. */
static CUcontext context_of(int device) { return (CUcontext)&has_context[device]; }

DRIVER cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    int before = current;
    current = device;
    cudaError_t error = make_context();
    current = before;
    if (error) return CUDA_ERROR_OUT_OF_MEMORY;
    *context = context_of(device);
    return CUDA_SUCCESS;
}

DRIVER cuCtxGetCurrent(CUcontext *context) {
    *context = process && has_context[current] ? context_of(current) : nullptr;
    return CUDA_SUCCESS;
}

DRIVER cuCtxSetCurrent(CUcontext context) {
    if (context) current = (int)((bool *)context - has_context);
    DRIVER_IN_CONTEXT;
    return CUDA_SUCCESS;
}

DRIVER cuCtxGetDevice(CUdevice *device) { return cuDeviceGet(device, current); }

DRIVER cuCtxGetLimit(size_t *value, CUlimit) {
    *value = 0;
    return CUDA_SUCCESS;
}

DRIVER cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }

DRIVER cuGetErrorString(CUresult error, const char **words) {
    *words = cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

DRIVER cuModuleLoadData(CUmodule *module, const void *) {
    DRIVER_IN_CONTEXT;
    make(module);
    return CUDA_SUCCESS;
}

DRIVER cuModuleLoadDataEx(CUmodule *module, const void *data, unsigned, CUjit_option *, void **) {
    return cuModuleLoadData(module, data);
}

DRIVER cuModuleLoad(CUmodule *module, const char *) { return cuModuleLoadData(module, nullptr); }
DRIVER cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

DRIVER cuModuleGetFunction(CUfunction *function, CUmodule, const char *) {
    make(function);
    return CUDA_SUCCESS;
}

DRIVER cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction) {
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

DRIVER cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
DRIVER cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }

DRIVER cuStreamIsCapturing(CUstream, CUstreamCaptureStatus *status) {
    *status = (CUstreamCaptureStatus)capture_status();
    return CUDA_SUCCESS;
}

DRIVER cuLaunchKernel(
    CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **) {
    return CUDA_SUCCESS;
}

DRIVER cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) { return CUDA_SUCCESS; }

DRIVER cuLaunchCooperativeKernel(
    CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **) {
    return CUDA_SUCCESS;
}

DRIVER cuOccupancyMaxActiveBlocksPerMultiprocessor(int *num_blocks, CUfunction, int, size_t) {
    *num_blocks = 2;
    return CUDA_SUCCESS;
}

DRIVER cuOccupancyMaxActiveClusters(int *num_clusters, CUfunction, const CUlaunchConfig *) {
    *num_clusters = 1;
    return CUDA_SUCCESS;
}

DRIVER cuTensorMapEncodeTiled(
    CUtensorMap *,
    CUtensorMapDataType,
    cuuint32_t,
    void *,
    const cuuint64_t *,
    const cuuint64_t *,
    const cuuint32_t *,
    const cuuint32_t *,
    CUtensorMapInterleave,
    CUtensorMapSwizzle,
    CUtensorMapL2promotion,
    CUtensorMapFloatOOBfill) {
    return CUDA_SUCCESS;
}

DRIVER cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr pointer) {
    int device = device_of((const void *)pointer);
    if (device < 0) return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        *(CUdeviceptr *)value = pointer;
    else
        *(int *)value = which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? device : 0;
    return CUDA_SUCCESS;
}

/* Memory of the driver: expandable segments are made of it. */

DRIVER cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *bytes = PAGE;
    return CUDA_SUCCESS;
}

DRIVER cuMemAddressReserve(CUdeviceptr *to, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    DRIVER_IN_CONTEXT;
    *to = (CUdeviceptr)address_space(bytes);
    return *to ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

DRIVER cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
    munmap((void *)pointer, bytes);
    return CUDA_SUCCESS;
}

/* A handle is its number of bytes, whole pages, and the number of its card. */
DRIVER cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property, unsigned long long) {
    DRIVER_IN_CONTEXT;
    int device = property ? property->location.id : current;
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!take(bytes, device)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = (CUmemGenericAllocationHandle)(bytes + (size_t)device);
    return CUDA_SUCCESS;
}

DRIVER cuMemRelease(CUmemGenericAllocationHandle handle) {
    give_back((size_t)handle / PAGE * PAGE, (int)((size_t)handle % PAGE));
    return CUDA_SUCCESS;
}

DRIVER cuMemMap(CUdeviceptr pointer, size_t bytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    mprotect((void *)pointer, bytes, PROT_READ | PROT_WRITE);
    std::lock_guard<std::mutex> guard(blocks_mutex);
    blocks[(uintptr_t)pointer] = {bytes, false, (int)((size_t)handle % PAGE)};
    return CUDA_SUCCESS;
}

DRIVER cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
    forget((void *)pointer, bytes);
    std::lock_guard<std::mutex> guard(blocks_mutex);
    blocks.erase((uintptr_t)pointer);
    return CUDA_SUCCESS;
}

DRIVER cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) { return CUDA_SUCCESS; }

/* Needed by libcaffe2_nvrtc.so to be loaded, and by no training step. */

DRIVER cuLinkCreate(unsigned, CUjit_option *, void **, CUlinkState *) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER cuLinkComplete(CUlinkState, void **, size_t *) { return CUDA_ERROR_NOT_SUPPORTED; }
DRIVER cuLinkAddData(
    CUlinkState, CUjitInputType, void *, size_t, const char *, unsigned, CUjit_option *, void **) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
