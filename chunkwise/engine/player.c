/* The launches of a recipe in one call: addresses go into a copy of the parameters that lie ready, and the driver is called. This is what
   Triton's launchers do for one kernel and its arguments. It is built as they are, by Triton, without headers of CUDA's. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdalign.h>
#include <stdint.h>
#include <string.h>

typedef struct { /* the driver's CUlaunchConfig */
    unsigned grid[3], threads[3], shared;
    void *stream, *attributes;
    unsigned count;
} Shape;

typedef struct { /* an address: so many bytes into one of the call's pieces of memory, and where in the board's memory it is wanted */
    int64_t base, offset, where;
} Place;

typedef struct {
    unsigned grid[2], threads, shared;
    void *function;
    int64_t first, count; /* of its parameters among all */
} Launch;

typedef struct {
    int (*start)(const Shape *, void *, void **, void **); /* cuLaunchKernelEx */
    int (*move)(void *, void *);                           /* cuTensorMapReplaceAddress */
    int64_t bases, inputs, size, places, maps, launches, parameters;
    char *memory;       /* tensor maps, words */
    Place *place;       /* of words, then of maps */
    Launch *launch;
    int64_t *parameter; /* where in the memory each is */
} Board;

enum { SIZE = 1 << 15, PARAMETERS = 1 << 12, BASES = 1 << 8 }; /* what a call has room for: several times what any member needs */

static const char *NAME = "chunkwise.board";

static void let_go(PyObject *capsule) {
    Board *b = PyCapsule_GetPointer(capsule, NAME);
    PyMem_Free(b->memory), PyMem_Free(b->place), PyMem_Free(b->launch), PyMem_Free(b->parameter), PyMem_Free(b);
}

static void *copied(const char *from, Py_ssize_t n) {
    void *to = PyMem_Malloc(n);
    return to ? memcpy(to, from, n) : NULL;
}

/* board(start, move, bases, inputs, memory, places, maps, launches, parameters): the addresses of the driver's functions; how many pieces of
   memory a call has, and how many of them are the caller's; the rest as above, packed. */
static PyObject *board(PyObject *self, PyObject *args) {
    unsigned long long start, move;
    long long bases, inputs, maps;
    const char *memory, *place, *launch, *parameter;
    Py_ssize_t size, places, launches, parameters;
    if (!PyArg_ParseTuple(args, "KKLLy#y#Ly#y#", &start, &move, &bases, &inputs, &memory, &size, &place, &places, &maps, &launch, &launches,
                          &parameter, &parameters))
        return NULL;
    if (size > SIZE || parameters > PARAMETERS * 8 || bases > BASES)
        return PyErr_Format(PyExc_ValueError, "%zd bytes, %zd parameters, %lld pieces: too many", size, parameters / 8, bases);
    Board *b = PyMem_Calloc(1, sizeof(Board));
    PyObject *made = b ? PyCapsule_New(b, NAME, let_go) : NULL;
    if (!made) {
        PyMem_Free(b);
        return PyErr_NoMemory();
    }
    b->start = (void *)start, b->move = (void *)move, b->bases = bases, b->inputs = inputs, b->size = size, b->maps = maps;
    b->places = places / sizeof(Place), b->launches = launches / sizeof(Launch), b->parameters = parameters / 8;
    b->memory = copied(memory, size), b->place = copied(place, places), b->launch = copied(launch, launches);
    b->parameter = copied(parameter, parameters);
    if (!b->memory || !b->place || !b->launch || !b->parameter) {
        Py_DECREF(made);
        return PyErr_NoMemory();
    }
    return made;
}

/* play(board, have, stream, first, last): launch kernels `first` to before `last` on the call's pieces of memory, a list: tensors, addresses,
   None. False, and nothing is launched, if one of the caller's does not begin at a multiple of 16 bytes. */
static PyObject *play(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    static PyObject *data_ptr = NULL;
    alignas(64) char memory[SIZE];
    void *parameter[PARAMETERS];
    uint64_t base[BASES];
    if (n != 5)
        return PyErr_Format(PyExc_TypeError, "play takes 5 arguments, got %zd", n);
    Board *b = PyCapsule_GetPointer(args[0], NAME);
    if (!b || (!data_ptr && !(data_ptr = PyUnicode_InternFromString("data_ptr"))))
        return NULL;
    void *stream = PyLong_AsVoidPtr(args[2]);
    long first = PyLong_AsLong(args[3]), last = PyLong_AsLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (!PyList_Check(args[1]) || PyList_GET_SIZE(args[1]) != b->bases || first < 0 || last > b->launches)
        return PyErr_Format(PyExc_ValueError, "play: the board has %lld pieces of memory and %lld launches", b->bases, b->launches);
    for (int64_t i = 0; i < b->bases; i++) {
        PyObject *t = PyList_GET_ITEM(args[1], i);
        base[i] = 0;
        if (t == Py_None)
            continue;
        PyObject *at = PyLong_Check(t) ? Py_NewRef(t) : PyObject_CallMethodNoArgs(t, data_ptr);
        if (!at)
            return NULL;
        base[i] = PyLong_AsUnsignedLongLong(at);
        Py_DECREF(at);
        if (PyErr_Occurred()) {
            PyErr_Clear();
            return PyErr_Format(PyExc_ValueError, "play: piece %lld of the memory must be an address, got %R", (long long)i, t);
        }
        if (i < b->inputs && base[i] & 15)
            Py_RETURN_FALSE;
    }
    int result = 0;
    Py_BEGIN_ALLOW_THREADS; /* a launch waits where too many are under way */
    memcpy(memory, b->memory, b->size);
    for (int64_t i = 0; i < b->places && !result; i++) {
        const Place *p = b->place + i;
        uint64_t at = base[p->base] ? base[p->base] + p->offset : 0; /* what comes later is not read yet */
        if (i < b->places - b->maps)
            memcpy(memory + p->where, &at, 8);
        else if (at)
            result = b->move(memory + p->where, (void *)at);
    }
    for (int64_t i = 0; i < b->parameters; i++)
        parameter[i] = memory + b->parameter[i];
    for (long i = first; i < last && !result; i++) {
        const Launch *l = b->launch + i;
        Shape shape = {{l->grid[0], l->grid[1], 1}, {l->threads, 1, 1}, l->shared, stream, NULL, 0};
        result = b->start(&shape, l->function, parameter + l->first, NULL);
    }
    Py_END_ALLOW_THREADS;
    if (result)
        return PyErr_Format(PyExc_RuntimeError, "chunkwise engine: a launch failed with error %d of the CUDA driver", result);
    Py_RETURN_TRUE;
}

static PyMethodDef METHODS[] = {
    {"board", board, METH_VARARGS, NULL},
    {"play", (PyCFunction)(void *)play, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "chunkwise_player", NULL, -1, METHODS};

PyMODINIT_FUNC PyInit_chunkwise_player(void) {
    PyObject *made = PyModule_Create(&MODULE);
    if (made && (PyModule_AddIntMacro(made, SIZE) || PyModule_AddIntMacro(made, PARAMETERS) || PyModule_AddIntMacro(made, BASES)))
        Py_CLEAR(made);
    return made;
}
