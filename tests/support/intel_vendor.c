/* OpenVINO's execution provider behind this library takes the processor for one of Intel's.
 *
 * The provider computes on every x86-64 processor, but offers no device unless the vendor of the processor is Intel.
 * It asks ONNX Runtime for the vendor, through the table of functions that it is handed when it is loaded. It gets a
 * copy of that table here, in which this one function is ours; everything else is the provider's and ONNX Runtime's
 * own code.
 *
 *     gcc -shared -fPIC -DLIBRARY='"/path/of/the/provider.so"' intel_vendor.c -o intel_vendor.so
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The head of ONNX Runtime's C interface, and the entries of an execution provider's library, as in
 * onnxruntime_c_api.h and onnxruntime_ep_c_api.h. OrtApi is a struct of pointers to functions. */
typedef struct {
    const void *(*get_api)(uint32_t version);
    const char *(*get_version)(void);
} ApiBase;
typedef void *(*CreateFactories)(const char *, const ApiBase *, const void *, void **, size_t, size_t *);
typedef void *(*ReleaseFactory)(void *);

/* Where HardwareDevice_VendorId is in OrtApi. Releases only append to that, so that this holds from 1.23 on. */
enum { VENDOR_ID = 308 };
/* More than OrtApi has, which does not say how many it has: what follows it is other data of ONNX Runtime, which
 * is copied and never called. */
enum { ENTRIES = 512 };
enum { INTEL = 0x8086 };

static const ApiBase *runtime;
static ApiBase base;
static const void *table[ENTRIES];
static void *library;

static uint32_t say_intel(const void *device) {
    (void)device;
    return INTEL;
}

static const void *get_table(uint32_t version) {
    const void *own = runtime->get_api(version);
    if (own == NULL) return NULL; /* this ONNX Runtime is older than the provider, which says so */
    memcpy(table, own, sizeof table);
    table[VENDOR_ID] = (const void *)say_intel;
    return table;
}

/* Return a function of the provider's library; end the process with the reason where that cannot be loaded. */
static void *find(const char *name) {
    if (library == NULL) library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    void *function = library == NULL ? NULL : dlsym(library, name);
    if (function == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    return function;
}

void *CreateEpFactories(const char *name, const ApiBase *own, const void *logger, void **factories, size_t most,
                        size_t *count) {
    runtime = own;
    base = (ApiBase){get_table, own->get_version};
    return ((CreateFactories)find("CreateEpFactories"))(name, &base, logger, factories, most, count);
}

void *ReleaseEpFactory(void *factory) {
    return ((ReleaseFactory)find("ReleaseEpFactory"))(factory);
}
