/* cuBLAS, cuBLASLt and cuDNN that compute nothing and need no workspace of their own.

   PyTorch asks cuBLAS only to work in a workspace that PyTorch has allocated; what cuDNN's attention
   would ask for is not known here, and taken to be nothing. */

#include <cstdint>

#include "card.h"

#define LIBRARY EXPORTED int

namespace {

/* More than any handle or descriptor that a caller could look into. */
int make(void **handle) {
    *handle = calloc(1, 1 << 16);
    return *handle ? 0 : 1;
}

int unmake(void *handle) {
    free(handle);
    return 0;
}

}  // namespace

#define NOTHING(name) \
    LIBRARY name() { return 0; }

LIBRARY cublasCreate_v2(void **handle) { return make(handle); }
LIBRARY cublasDestroy_v2(void *handle) { return unmake(handle); }
LIBRARY cublasGetMathMode(void *, int *mode) { return *mode = 0; }
LIBRARY cublasGetPointerMode_v2(void *, int *mode) { return *mode = 0; }
NOTHING(cublasSetStream_v2)
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetMathMode)
NOTHING(cublasSetPointerMode_v2)
NOTHING(cublasGemmEx)
NOTHING(cublasGemmStridedBatchedEx)
NOTHING(cublasDotEx)
NOTHING(cublasSgemmEx)
NOTHING(cublasSgemm_v2)
NOTHING(cublasSgemmStridedBatched)
NOTHING(cublasSgemv_v2)
NOTHING(cublasSdot_v2)
NOTHING(cublasDgemm_v2)
NOTHING(cublasDgemmStridedBatched)
NOTHING(cublasDgemv_v2)
NOTHING(cublasDdot_v2)
NOTHING(cublasCgemm_v2)
NOTHING(cublasCgemmStridedBatched)
NOTHING(cublasSgetrfBatched)
NOTHING(cublasSgetrsBatched)
NOTHING(cublasSgeqrfBatched)
NOTHING(cublasStrsm_v2)
NOTHING(cublasStrsmBatched)

LIBRARY cublasLtMatmulDescCreate(void **descriptor, int, int) { return make(descriptor); }
LIBRARY cublasLtMatmulDescDestroy(void *descriptor) { return unmake(descriptor); }
LIBRARY cublasLtMatrixLayoutCreate(void **layout, int, uint64_t, uint64_t, int64_t) { return make(layout); }
LIBRARY cublasLtMatrixLayoutDestroy(void *layout) { return unmake(layout); }
LIBRARY cublasLtMatmulPreferenceCreate(void **preference) { return make(preference); }
LIBRARY cublasLtMatmulPreferenceDestroy(void *preference) { return unmake(preference); }
NOTHING(cublasLtMatmulDescSetAttribute)
NOTHING(cublasLtMatrixLayoutSetAttribute)
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatmul)

/* cublasLtMatmulHeuristicResult_t, of cublasLt.h in CUDA 13.0: one way, without a workspace. */
struct Heuristic {
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float num_waves;
    int reserved[4];
};

LIBRARY cublasLtMatmulAlgoGetHeuristic(
    void *, void *, void *, void *, void *, void *, void *, int, Heuristic *results, int *num_results) {
    results[0] = {};
    *num_results = 1;
    return 0;
}

LIBRARY cudnnCreate(void **handle) { return make(handle); }
LIBRARY cudnnDestroy(void *handle) { return unmake(handle); }
NOTHING(cudnnSetStream)
LIBRARY cudnnGetStream(void *, void **stream) { return (*stream = nullptr, 0); }
LIBRARY cudnnBackendCreateDescriptor(int, void **descriptor) { return make(descriptor); }
LIBRARY cudnnBackendDestroyDescriptor(void *descriptor) { return unmake(descriptor); }
NOTHING(cudnnBackendSetAttribute)
NOTHING(cudnnBackendFinalize)
NOTHING(cudnnBackendExecute)

/* One engine, one plan, of which every number is 0: cudnnBackendAttributeType_t of cudnn_graph.h, 9.19. */
LIBRARY cudnnBackendGetAttribute(void *, int, int type, int64_t wanted, int64_t *count, void *to) {
    enum { INT64 = 3, BACKEND_DESCRIPTOR = 15, INT32 = 23 };
    const size_t size = type == INT64 ? 8 : type == INT32 ? 4 : 0;
    if (to && wanted > 0) memset(to, 0, size);
    if (count) *count = size || type == BACKEND_DESCRIPTOR;
    return 0;
}
