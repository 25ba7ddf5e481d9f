// The look-up of a kept call at a third of Python's cost: what `_look` of calls.py does, in the same order.
//
// Lookup(kept, forward_ad, function_modes, tensor)(name, options, input, others) returns the call kept for tensors like
// these, or None; also where a mode of functions or forward AD watches, and where an argument is none that is looked up.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>

#define MOST_TENSORS 16

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *kept, *forward_ad, *function_modes, *tensor;
} Lookup;

static PyObject *data_ptr_name, *level_name, *shape_name;

static int is_watched(Lookup *self) {  // -1: an error
  PyObject *level = PyObject_GetAttr(self->forward_ad, level_name);
  if (!level) return -1;
  long depth = PyLong_AsLong(level);
  Py_DECREF(level);
  if (depth >= 0 || PyErr_Occurred()) return depth >= 0 ? 1 : -1;
  PyObject *modes = PyObject_CallNoArgs(self->function_modes);
  if (!modes) return -1;
  int some = PyObject_IsTrue(modes);
  Py_DECREF(modes);
  return some;
}

static int is_like(PyObject *entry, PyObject *const *tensors, Py_ssize_t n) {  // -1: an error
  PyObject *same = PyObject_Vectorcall(PyTuple_GET_ITEM(entry, 0), tensors, n, NULL);
  if (!same) return -1;
  int like = PyObject_IsTrue(same);
  Py_DECREF(same);
  PyObject *places = PyTuple_GET_ITEM(entry, 1);
  for (Py_ssize_t i = 0; like == 1 && i < n; ++i) {
    PyObject *address = PyObject_CallMethodNoArgs(tensors[i], data_ptr_name);
    if (!address) return -1;
    unsigned long long place = PyLong_AsUnsignedLongLong(address) & 15;
    Py_DECREF(address);
    if (PyErr_Occurred()) return -1;
    like = place == PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(places, i));
  }
  return like;
}

static PyObject *found(Lookup *self, PyObject *key, PyObject *const *tensors, Py_ssize_t n) {
  PyObject *entries = PyDict_GetItemWithError(self->kept, key), *call = NULL;
  if (!entries) return NULL;
  Py_INCREF(entries);  // another thread may put a longer list in its place
  for (Py_ssize_t i = 0; !call && i < PyList_GET_SIZE(entries); ++i) {
    PyObject *entry = PyList_GET_ITEM(entries, i);
    int like = is_like(entry, tensors, n);
    if (like < 0) break;
    if (like) call = Py_NewRef(PyTuple_GET_ITEM(entry, 2));
  }
  Py_DECREF(entries);
  return call;
}

// What the key has in the place of another argument: None or the string itself, Tensor for a tensor, and for one that
// came before the index of that.
static PyObject *kind_of(Lookup *self, PyObject *other, PyObject **tensors, Py_ssize_t *n) {
  if (other == Py_None || PyUnicode_CheckExact(other)) return Py_NewRef(other);
  for (Py_ssize_t i = 0; i < *n; ++i)
    if (tensors[i] == other) return PyLong_FromSsize_t(i);
  tensors[(*n)++] = other;
  return Py_NewRef(self->tensor);
}

static PyObject *look(Lookup *self, PyObject *name, PyObject *options, PyObject *input, PyObject *others) {
  PyObject *tensors[MOST_TENSORS + 1] = {input};
  Py_ssize_t n = 1, n_others = PyTuple_GET_SIZE(others);
  int watched = is_watched(self);
  if (watched || n_others > MOST_TENSORS) return NULL;
  PyObject *shape = PyObject_GetAttr(input, shape_name);
  if (!shape) return NULL;
  PyObject *key = PyTuple_New(3 + n_others);
  if (!key) {
    Py_DECREF(shape);
    return NULL;
  }
  PyTuple_SET_ITEM(key, 0, Py_NewRef(name));
  PyTuple_SET_ITEM(key, 1, Py_NewRef(options));
  PyTuple_SET_ITEM(key, 2, shape);
  PyObject *call = NULL;
  for (Py_ssize_t i = 0; i < n_others; ++i) {
    PyObject *kind = kind_of(self, PyTuple_GET_ITEM(others, i), tensors, &n);
    if (!kind) goto done;
    PyTuple_SET_ITEM(key, 3 + i, kind);
  }
  call = found(self, key, tensors, n);
done:
  Py_DECREF(key);
  return call;
}

static PyObject *lookup_call(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  if (names || PyVectorcall_NARGS(flags) != 4 || !PyTuple_Check(args[3])) {
    PyErr_SetString(PyExc_TypeError, "a look-up takes a name, options, an input and a tuple of others");
    return NULL;
  }
  PyObject *call = look((Lookup *)self, args[0], args[1], args[2], args[3]);
  if (call) return call;
  if (PyErr_Occurred()) {  // no shape, no address, or an option that is none: an error later
    if (!PyErr_ExceptionMatches(PyExc_AttributeError) && !PyErr_ExceptionMatches(PyExc_RuntimeError) &&
        !PyErr_ExceptionMatches(PyExc_TypeError))
      return NULL;
    PyErr_Clear();
  }
  Py_RETURN_NONE;
}

static PyObject *lookup_new(PyTypeObject *type, PyObject *args, PyObject *names) {
  PyObject *kept, *forward_ad, *function_modes, *tensor;
  if (!PyArg_ParseTuple(args, "O!OOO", &PyDict_Type, &kept, &forward_ad, &function_modes, &tensor)) return NULL;
  Lookup *self = (Lookup *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = lookup_call;
  self->kept = Py_NewRef(kept);
  self->forward_ad = Py_NewRef(forward_ad);
  self->function_modes = Py_NewRef(function_modes);
  self->tensor = Py_NewRef(tensor);
  return (PyObject *)self;
}

static int lookup_traverse(Lookup *self, visitproc visit, void *arg) {
  Py_VISIT(self->kept);
  Py_VISIT(self->forward_ad);
  Py_VISIT(self->function_modes);
  Py_VISIT(self->tensor);
  return 0;
}

static int lookup_clear(Lookup *self) {
  Py_CLEAR(self->kept);
  Py_CLEAR(self->forward_ad);
  Py_CLEAR(self->function_modes);
  Py_CLEAR(self->tensor);
  return 0;
}

static void lookup_dealloc(Lookup *self) {
  PyObject_GC_UnTrack(self);
  lookup_clear(self);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject LookupType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fused_softmax_lookup.Lookup",
    .tp_doc = "Finds kept calls.",
    .tp_basicsize = sizeof(Lookup),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = lookup_new,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Lookup, call),
    .tp_traverse = (traverseproc)lookup_traverse,
    .tp_clear = (inquiry)lookup_clear,
    .tp_dealloc = (destructor)lookup_dealloc,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fused_softmax_lookup", NULL, -1, NULL};

PyMODINIT_FUNC PyInit_fused_softmax_lookup(void) {
  data_ptr_name = PyUnicode_InternFromString("data_ptr");
  level_name = PyUnicode_InternFromString("_current_level");
  shape_name = PyUnicode_InternFromString("shape");
  if (!data_ptr_name || !level_name || !shape_name || PyType_Ready(&LookupType) < 0) return NULL;
  PyObject *self = PyModule_Create(&module);
  if (self && PyModule_AddObjectRef(self, "Lookup", (PyObject *)&LookupType) < 0) Py_CLEAR(self);
  return self;
}
