/* Preloaded into ranks that share one GPU. Transformer Engine's userbuffers want a GPU for each rank, with access to the
   others' memory. To them alone there are as many GPUs as ranks, and each is the first. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static void *real(const char *name) {
  void *found = dlsym(RTLD_NEXT, name);
  return found ? found : dlsym(dlopen("libcudart.so.13", RTLD_NOW | RTLD_GLOBAL), name);
}

static int asks_for_userbuffers(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "transformer_engine");
}

#define FOR_USERBUFFERS asks_for_userbuffers(__builtin_return_address(0))
#define REAL(name, ...) static int (*call)(__VA_ARGS__); if (!call) call = real(#name)

int cudaGetDeviceCount(int *count) {
  REAL(cudaGetDeviceCount, int *);
  int error = call(count);
  if (FOR_USERBUFFERS && !error) *count = atoi(getenv("RANKS_ON_ONE_GPU"));
  return error;
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  REAL(cudaDeviceCanAccessPeer, int *, int, int);
  if (!FOR_USERBUFFERS) return call(can, device, peer);
  *can = 1;
  return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  REAL(cudaDeviceGetAttribute, int *, int, int);
  return call(value, attribute, FOR_USERBUFFERS ? 0 : device);
}

int cudaGetDeviceProperties(void *properties, int device) {
  REAL(cudaGetDeviceProperties, void *, int);
  return call(properties, FOR_USERBUFFERS ? 0 : device);
}

int cudaSetDevice(int device) {
  REAL(cudaSetDevice, int);
  return call(FOR_USERBUFFERS ? 0 : device);
}
