// A loaded Triton kernel with its grid and most of its arguments: calling it costs the host a little more than the driver.
//
// Bound(function, grid, block, shared, follows, kinds, values, given, stream_of, device, hooks, elsewhere) keeps one
// 64-bit word for each parameter. kinds has a letter for each: p a pointer, i an integer, f a float of 32 bits. given are
// the places of the parameters that every call supplies, in its order; values holds the others. t is a map of a tensor
// (TMA's, 128 bytes): its value is Triton's own object, of which each call's tensor replaces the address. follows: the
// kernel may begin before the launch before it has ended, for which it waits by itself. Where anything is out of the
// ordinary (somebody listens to a launch hook, another device is current, this thread has no context yet), the call goes
// to `elsewhere` with the same arguments.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stddef.h>
#include <string.h>

#define MOST_PARAMS 96
#define MOST_MAPS 9
#define LEAST 0x1p-149f

typedef struct {
  _Alignas(64) unsigned char bytes[128];
} Map;  // CUtensorMap

typedef struct {
  int id, unused, value;
  char rest[60];
} Attribute;  // CUlaunchAttribute

static Attribute overlaps = {.id = 6, .value = 1};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned n_attributes;
} Config;  // CUlaunchConfig

static int (*launch_kernel)(const Config *, void *, void **, void **);
static int (*current_context)(void **);
static int (*error_string)(int, const char **);
static int (*replace_address)(Map *, void *);
static PyObject *data_ptr_name, *enter_name, *exit_name;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  void *function;
  unsigned grid[3], block, shared, follows;
  int n_params, n_given;
  unsigned char given[MOST_PARAMS];
  char kinds[MOST_PARAMS + 1];
  uint64_t values[MOST_PARAMS];  // of a map its place among the maps
  int n_maps;
  unsigned char maps[MOST_MAPS][sizeof(Map)];
  PyObject *stream_of, *device, *current_device;  // current_device: None where there is one device alone
  PyObject *runtime, *enter, *leave, *entered, *left, *elsewhere;
} Bound;

static int convert(char kind, PyObject *value, uint64_t *word) {
  if (kind == 'f') {
    double given = PyFloat_AsDouble(value);
    float number = (float)given;
    if (number == 0 && given != 0) number = given < 0 ? -LEAST : LEAST;  // 0 is another thing than its neighbours
    *word = 0;
    memcpy(word, &number, sizeof number);
  } else if (value == Py_None) {
    *word = 0;
  } else if (PyLong_Check(value)) {
    *word = PyLong_AsUnsignedLongLongMask(value);
  } else {
    PyObject *address = PyObject_CallMethodNoArgs(value, data_ptr_name);
    if (!address) return -1;
    *word = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
  }
  return *word == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int heard(Bound *self) {  // -1: an error; 1: somebody listens
  if (PyList_GET_SIZE(self->entered) || PyList_GET_SIZE(self->left)) return 1;
  PyObject *enter = PyObject_GetAttr(self->runtime, enter_name);
  if (!enter) return -1;
  Py_DECREF(enter);
  PyObject *leave = PyObject_GetAttr(self->runtime, exit_name);
  if (!leave) return -1;
  Py_DECREF(leave);
  return enter != self->enter || leave != self->leave;
}

static int is_elsewhere(Bound *self) {
  void *context = NULL;
  int other = heard(self);
  if (other) return other;
  if (self->current_device != Py_None) {
    PyObject *current = PyObject_CallNoArgs(self->current_device);
    if (!current) return -1;
    other = PyObject_RichCompareBool(current, self->device, Py_NE);
    Py_DECREF(current);
    if (other) return other;
  }
  return current_context(&context) || !context;
}

static PyObject *bound_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
  Bound *self = (Bound *)callable;
  Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n != self->n_given) {
    PyErr_Format(PyExc_TypeError, "this launch takes %d arguments, got %zd", self->n_given, n);
    return NULL;
  }
  int other = is_elsewhere(self);
  if (other < 0) return NULL;
  if (other) return PyObject_Vectorcall(self->elsewhere, args, n, NULL);

  uint64_t values[MOST_PARAMS + 2];
  void *params[MOST_PARAMS + 2];
  Map maps[MOST_MAPS];
  memcpy(values, self->values, self->n_params * sizeof *values);
  memcpy(maps, self->maps, self->n_maps * sizeof *maps);
  for (int i = 0; i < n; ++i) {
    int at = self->given[i];
    if (self->kinds[at] == 't') {
      uint64_t address;
      if (convert('p', args[i], &address)) return NULL;
      if (replace_address(&maps[values[at]], (void *)address)) {
        PyErr_SetString(PyExc_RuntimeError, "a tensor that is read by tiles must begin at a multiple of 16 bytes");
        return NULL;
      }
    } else if (convert(self->kinds[at], args[i], &values[at])) {
      return NULL;
    }
  }
  // Triton's kernels end with two pointers to scratch memory, which those bound here have none of.
  values[self->n_params] = values[self->n_params + 1] = 0;
  for (int i = 0; i < self->n_params + 2; ++i) params[i] = &values[i];
  for (int i = 0; self->n_maps && i < self->n_params; ++i)
    if (self->kinds[i] == 't') params[i] = &maps[values[i]];
  PyObject *stream = PyObject_CallOneArg(self->stream_of, self->device);
  if (!stream) return NULL;
  Config config = {.grid = {self->grid[0], self->grid[1], self->grid[2]}, .block = {self->block, 1, 1},
                   .shared = self->shared, .stream = (void *)PyLong_AsUnsignedLongLong(stream),
                   .attributes = &overlaps, .n_attributes = self->follows};
  Py_DECREF(stream);
  if (PyErr_Occurred()) return NULL;
  int error;
  Py_BEGIN_ALLOW_THREADS
  error = launch_kernel(&config, self->function, params, NULL);
  Py_END_ALLOW_THREADS
  if (error) {
    const char *text = "unknown error";
    error_string(error, &text);
    PyErr_Format(PyExc_RuntimeError, "Triton Error [CUDA]: %s", text);
    return NULL;
  }
  Py_RETURN_NONE;
}

// Triton's object ends with its map.
static int add_map(Bound *self, PyObject *value, uint64_t *place) {
  Py_ssize_t size = Py_TYPE(value)->tp_basicsize;
  if (!replace_address || self->n_maps == MOST_MAPS || size % 64 || size < 192 || size > 256) {
    PyErr_SetString(PyExc_ValueError, "a launch has at most 9 maps of tensors, which this driver must know");
    return -1;
  }
  memcpy(self->maps[self->n_maps], (char *)value + size - sizeof(Map), sizeof(Map));
  *place = self->n_maps++;
  return 0;
}

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  unsigned long long function;
  unsigned grid[3], block, shared;
  int follows;
  const char *kinds;
  PyObject *values, *given, *kept[9];
  if (!PyArg_ParseTuple(args, "K(III)IIpsO!O!OOO(OOOOO)O", &function, &grid[0], &grid[1], &grid[2], &block, &shared,
                        &follows, &kinds, &PyTuple_Type, &values, &PyTuple_Type, &given, &kept[0], &kept[1], &kept[2], &kept[3],
                        &kept[4], &kept[5], &kept[6], &kept[7], &kept[8]))
    return NULL;
  Py_ssize_t n_params = strlen(kinds), n_given = PyTuple_GET_SIZE(given);
  if (n_params > MOST_PARAMS || PyTuple_GET_SIZE(values) != n_params || n_given > n_params ||
      !PyList_Check(kept[6]) || !PyList_Check(kept[7])) {
    PyErr_SetString(PyExc_ValueError, "a launch has one kind and one value for each of its parameters, 96 at most");
    return NULL;
  }
  Bound *self = (Bound *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = bound_call;
  self->function = (void *)function;
  memcpy(self->grid, grid, sizeof grid);
  self->block = block;
  self->shared = shared;
  self->follows = follows;
  self->n_params = (int)n_params;
  self->n_given = (int)n_given;
  memcpy(self->kinds, kinds, n_params + 1);
  PyObject **slots[] = {&self->stream_of, &self->device, &self->current_device, &self->runtime, &self->enter,
                        &self->leave, &self->entered, &self->left, &self->elsewhere};
  for (int i = 0; i < 9; ++i) *slots[i] = Py_NewRef(kept[i]);
  for (Py_ssize_t i = 0; i < n_given; ++i) {
    long at = PyLong_AsLong(PyTuple_GET_ITEM(given, i));
    if (at < 0 || at >= n_params) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a call supplies a parameter that there is not");
      Py_DECREF(self);
      return NULL;
    }
    self->given[i] = (unsigned char)at;
  }
  for (Py_ssize_t i = 0; i < n_params; ++i) {
    PyObject *value = PyTuple_GET_ITEM(values, i);
    if (kinds[i] == 't') {
      if (add_map(self, value, &self->values[i])) {
        Py_DECREF(self);
        return NULL;
      }
      continue;
    }
    if (value != Py_None && convert(kinds[i], value, &self->values[i])) {
      Py_DECREF(self);
      return NULL;
    }
  }
  return (PyObject *)self;
}

static int bound_traverse(Bound *self, visitproc visit, void *arg) {
  Py_VISIT(self->stream_of);
  Py_VISIT(self->device);
  Py_VISIT(self->current_device);
  Py_VISIT(self->runtime);
  Py_VISIT(self->enter);
  Py_VISIT(self->leave);
  Py_VISIT(self->entered);
  Py_VISIT(self->left);
  Py_VISIT(self->elsewhere);
  return 0;
}

static int bound_clear(Bound *self) {
  Py_CLEAR(self->stream_of);
  Py_CLEAR(self->device);
  Py_CLEAR(self->current_device);
  Py_CLEAR(self->runtime);
  Py_CLEAR(self->enter);
  Py_CLEAR(self->leave);
  Py_CLEAR(self->entered);
  Py_CLEAR(self->left);
  Py_CLEAR(self->elsewhere);
  return 0;
}

static void bound_dealloc(Bound *self) {
  PyObject_GC_UnTrack(self);
  bound_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject BoundType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fused_softmax_launcher.Bound",
    .tp_doc = "A loaded kernel with its grid and arguments.",
    .tp_basicsize = sizeof(Bound),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = bound_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Bound, call),
    .tp_traverse = (traverseproc)bound_traverse,
    .tp_clear = (inquiry)bound_clear,
    .tp_dealloc = (destructor)bound_dealloc,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fused_softmax_launcher", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_fused_softmax_launcher(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  if (driver) {
    *(void **)&launch_kernel = dlsym(driver, "cuLaunchKernelEx");
    *(void **)&current_context = dlsym(driver, "cuCtxGetCurrent");
    *(void **)&error_string = dlsym(driver, "cuGetErrorString");
    *(void **)&replace_address = dlsym(driver, "cuTensorMapReplaceAddress");  // or NULL: maps alone need it
  }
  if (!launch_kernel || !current_context || !error_string) {
    PyErr_SetString(PyExc_ImportError, "libcuda.so.1 has no cuLaunchKernelEx");
    return NULL;
  }
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  enter_name = PyUnicode_InternFromString("launch_enter_hook");
  exit_name = PyUnicode_InternFromString("launch_exit_hook");
  if (!data_ptr_name || !enter_name || !exit_name || PyType_Ready(&BoundType) < 0) return NULL;
  PyObject *self = PyModule_Create(&module);
  if (self && PyModule_AddObjectRef(self, "Bound", (PyObject *)&BoundType) < 0) Py_CLEAR(self);
  return self;
}
