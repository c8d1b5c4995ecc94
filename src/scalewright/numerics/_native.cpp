// Loops over the values of a tensor that torch does in several passes, or in pieces with Python in between:
//
//   ends    the least and the largest value of each row, in one pass
//   errors  what each of several scales loses
//   scores  the products and squares that the best scale for given codes is made from
//   chart   sums of rows of a table that values look up
//   scales  the symmetric scales of ranges
//   rounded codes of values, what these are read back as, and what that loses
//   losses  squares of values, and of how far others are from them
//   count   how often each number of bf16 is seen
//   squares the sum of squares of each row
//
// And a word on who made the processor, `vendor`, which decides who multiplies matrices (products.py).
//
// native.py is their face; what they compute is defined in torch, in extremes.py, judge.py, charts.py and histogram.py, and for
// `rounded` by compressed-tensors. Which candidates there are is no business of theirs. Sums are fp32 over one row, in
// one order; their last bits depend on whether the processor has fused multiply-adds, and on nothing else.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int INTERFACE = 3;  // counts whenever arguments change; native.py takes no other
constexpr int LANES = 16;
constexpr int MOST_COLUMNS = 4 * LANES;  // of a chart
constexpr int CHUNK = 32;  // elements that are summed before they are added to others
constexpr int TERMS = 5;    // of a polynomial that stands in for a power
constexpr int ANY = 0, CURVE = -1;  // norms that are no whole number
constexpr int32_t MAGNITUDE = 0x7FFFFFFF, EXPONENT = 0x7F800000;  // bits of fp32
constexpr int32_t LARGEST_BF16 = 0x7F7F;  // bits of the largest number
constexpr int64_t NUM_CODES = 1 << 16;    // of bf16
constexpr float TINY = 1.2e-38f;
constexpr int64_t WORTH_A_THREAD = 1 << 16;  // values, times candidates

struct Ends {
    const void *x;  // [rows, row_size]
    void *lo, *hi;  // [rows], of the same type, or of fp32
    int64_t row_size;
    int is_short, is_widened, infinity;  // whether values have 16 bits, the ends are fp32 though; bits of the infinity
    int64_t first, last;     // the rows to go over
};

struct Measure {
    const float *x, *weights;    // [rows, row_size]
    const float *scale, *point;  // [candidates, positions]
    const float *curves;         // [candidates, TERMS], or none
    float *out;                  // [candidates, rows]; of scores two of these; [rows] if there is an index
    int64_t *index;              // [rows], or none: the best candidate, where every position is one row
    int64_t rows, row_size, positions, rows_of_position, candidates;
    float low, high, smallest_normal, rounder;  // the grid; of integers the smallest normal is negative
    float norm, largest_scale;
    int64_t first, last;
};

struct Chart {
    const float *x, *weights;           // [rows, row_size]
    const float *factor, *zero, *base;  // [positions]: a value's line is x * factor + zero, from base on, of so many bins
    const float *table;                 // [all lines, columns]
    float *out;                         // [rows, columns]; [rows] if there is an index
    int64_t *index;                     // [rows], or none: the column with the least sum, of those that are used
    int64_t row_size, rows_of_position, columns, used, bins;
    int64_t first, last;
};

struct Ranges {
    const float *lo, *hi;  // [positions]
    float *out;            // [positions]
    float half, stand_in;  // of the grid's width; for a scale of 0
    float *largest;        // scale, of which infinity is one
    int64_t first, last;
};

struct Rounding {
    const void *x;         // [rows, row_size], fp32 or bf16
    const float *scale;    // [rows]
    int8_t *codes;         // [rows, row_size]
    void *restored;        // [rows, row_size], of the type of x; may be x itself
    double *lost;          // [rows, 2]: squares of x, and of its distance from what is restored
    int64_t row_size;
    float low, high, smallest_normal, rounder;  // the grid, as above
    int is_short;
    int64_t first, last;
};

struct Losses {
    const void *x, *y;  // [rows, row_size], fp32 or bf16
    double *out;        // [rows, 2]
    int64_t row_size;
    int is_short;
    int64_t first, last;
};

struct Counting {
    const void *x;          // [rows, row_size], fp32 or bf16
    const double *weights;  // [rows], or none
    void *out;              // [positions, NUM_CODES] of double, or of int64 without weights; to be added to
    int64_t row_size, positions;
    int is_short;
    int64_t first, last;
};

struct Squares {
    const void *x;  // [rows, row_size], fp32 or bf16
    double *out;    // [rows]
    int64_t row_size;
    int is_short;
    int64_t first, last;
};

#define BYTES 16
namespace plain {
#include "_loops.h"
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define BYTES 32
namespace v3 {
#include "_loops.h"
}
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define BYTES 64
namespace v4 {
#include "_loops.h"
}
#pragma GCC pop_options
#define AT(level, loop) ((level) == 2 ? v4::loop : (level) == 1 ? v3::loop : plain::loop)
int best_level() { return __builtin_cpu_supports("x86-64-v4") ? 2 : __builtin_cpu_supports("x86-64-v3") ? 1 : 0; }
#else
#define AT(level, loop) plain::loop
int best_level() { return 0; }
#endif

// Calls `loop(job)` on as many threads as are worth it, each with rows of its own. The threads are those of torch, which
// is there already: threads of our own would have to wait until torch's stop looking for work.
template <class Job>
void share(const Job &job, void (*loop)(const Job &), int64_t rows, int64_t work, int threads) {
    const int64_t most = std::min<int64_t>({threads, work / WORTH_A_THREAD, (rows + LANES - 1) / LANES});
    const int num = (int)std::max<int64_t>(most, 1);
#pragma omp parallel for num_threads(num) schedule(static, 1)
    for (int i = 0; i < num; i++) {
        Job part = job;
        part.first = rows * i / num / LANES * LANES;
        part.last = i + 1 == num ? rows : rows * (i + 1) / num / LANES * LANES;
        loop(part);
    }
}

// ---- the module ------------------------------------------------------------------------------------------------------

typedef unsigned long long Address;

template <class T>
T *at(Address address) { return (T *)(uintptr_t)address; }

PyObject *py_ends(PyObject *, PyObject *args) {
    Address x, lo, hi;
    long long rows, row_size;
    int is_short, is_widened, infinity, level, threads;
    if (!PyArg_ParseTuple(args, "KKKLLiiiii", &x, &lo, &hi, &rows, &row_size, &is_short, &is_widened, &infinity, &level,
                          &threads))
        return nullptr;
    const Ends job = {at<void>(x), at<void>(lo), at<void>(hi), row_size, is_short, is_widened, infinity, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, AT(level, ends), rows, rows * row_size / 4, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *measure(PyObject *args, bool is_scores) {
    Address x, weights, scale, point, curves, out, index;
    long long rows, row_size, positions, candidates;
    float low, high, smallest_normal, rounder, norm, largest_scale;
    int level, threads;
    if (!PyArg_ParseTuple(args, "KKKKKKKLLLLffffffii", &x, &weights, &scale, &point, &curves, &out, &index, &rows, &row_size, &positions,
                          &candidates, &low, &high, &smallest_normal, &rounder, &norm, &largest_scale, &level, &threads))
        return nullptr;
    const Measure job = {at<float>(x), at<float>(weights), at<float>(scale), at<float>(point), at<float>(curves),
                         at<float>(out), at<int64_t>(index), rows, row_size, positions, rows / positions, candidates, low, high,
                         smallest_normal, rounder, norm, largest_scale, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, is_scores ? AT(level, scores) : AT(level, errors), rows, rows * row_size * candidates, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_errors(PyObject *, PyObject *args) { return measure(args, false); }
PyObject *py_scores(PyObject *, PyObject *args) { return measure(args, true); }

PyObject *py_chart(PyObject *, PyObject *args) {
    Address x, weights, factor, zero, base, table, out, index;
    long long rows, row_size, positions, columns, used, bins;
    int level, threads;
    if (!PyArg_ParseTuple(args, "KKKKKKKKLLLLLLii", &x, &weights, &factor, &zero, &base, &table, &out, &index, &rows,
                          &row_size, &positions, &columns, &used, &bins, &level, &threads))
        return nullptr;
    const Chart job = {at<float>(x), at<float>(weights), at<float>(factor), at<float>(zero), at<float>(base),
                       at<float>(table), at<float>(out), at<int64_t>(index), row_size, rows / positions, columns, used, bins, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, AT(level, chart), rows, rows * row_size * 2, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_scales(PyObject *, PyObject *args) {
    Address lo, hi, out;
    long long size;
    float half, stand_in, largest = 0;
    int level;
    if (!PyArg_ParseTuple(args, "KKKLffi", &lo, &hi, &out, &size, &half, &stand_in, &level)) return nullptr;
    AT(level, symmetric_scales)({at<float>(lo), at<float>(hi), at<float>(out), half, stand_in, &largest, 0, size});
    return PyFloat_FromDouble(largest);
}

PyObject *py_rounded(PyObject *, PyObject *args) {
    Address x, scale, codes, restored, lost;
    long long rows, row_size;
    float low, high, smallest_normal, rounder;
    int is_short, level, threads;
    if (!PyArg_ParseTuple(args, "KKKKKLLffffiii", &x, &scale, &codes, &restored, &lost, &rows, &row_size, &low, &high,
                          &smallest_normal, &rounder, &is_short, &level, &threads))
        return nullptr;
    const Rounding job = {at<void>(x), at<float>(scale), at<int8_t>(codes), at<void>(restored), at<double>(lost), row_size,
                          low, high, smallest_normal, rounder, is_short, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, AT(level, roundings), rows, rows * row_size, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_losses(PyObject *, PyObject *args) {
    Address x, y, out;
    long long rows, row_size;
    int is_short, level, threads;
    if (!PyArg_ParseTuple(args, "KKKLLiii", &x, &y, &out, &rows, &row_size, &is_short, &level, &threads)) return nullptr;
    const Losses job = {at<void>(x), at<void>(y), at<double>(out), row_size, is_short, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, AT(level, losses), rows, rows * row_size / 2, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_count(PyObject *, PyObject *args) {
    Address x, weights, out;
    long long rows, row_size, positions, tables;
    int is_short, level;
    if (!PyArg_ParseTuple(args, "KKKLLLLii", &x, &weights, &out, &rows, &row_size, &positions, &tables, &is_short, &level))
        return nullptr;
    Py_BEGIN_ALLOW_THREADS
#pragma omp parallel for num_threads((int)tables) schedule(static, 1)
    for (int64_t i = 0; i < tables; i++)  // each thread has a table of its own
        AT(level, count)({at<void>(x), at<double>(weights), at<int64_t>(out) + i * positions * NUM_CODES, row_size, positions,
                          is_short, rows * i / tables, rows * (i + 1) / tables});
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_squares(PyObject *, PyObject *args) {
    Address x, out;
    long long rows, row_size;
    int is_short, level, threads;
    if (!PyArg_ParseTuple(args, "KKLLiii", &x, &out, &rows, &row_size, &is_short, &level, &threads)) return nullptr;
    const Squares job = {at<void>(x), at<double>(out), row_size, is_short, 0, 0};
    Py_BEGIN_ALLOW_THREADS
    share(job, AT(level, squares), rows, rows * row_size / 2, threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *py_best_level(PyObject *, PyObject *) { return PyLong_FromLong(best_level()); }

PyObject *py_vendor(PyObject *, PyObject *) {
    char name[13] = "";
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned highest, words[3];  // the name is told in another order than that of the registers
    if (__get_cpuid(0, &highest, &words[0], &words[2], &words[1])) std::memcpy(name, words, sizeof words);
#endif
    return PyUnicode_FromString(name);
}

PyMethodDef methods[] = {
    {"best_level", py_best_level, METH_NOARGS, "What this processor has: 2 for AVX-512, 1 for AVX2, else 0."},
    {"vendor", py_vendor, METH_NOARGS, "Who made the processor, as it says itself; empty if it is not x86."},
    {"ends", py_ends, METH_VARARGS, "The least and the largest value of each row."},
    {"errors", py_errors, METH_VARARGS, "What scales lose."},
    {"scores", py_scores, METH_VARARGS, "Products of values and codes, and squares of codes."},
    {"chart", py_chart, METH_VARARGS, "Sums of the rows of a table."},
    {"scales", py_scales, METH_VARARGS, "Symmetric scales of ranges; gives the largest."},
    {"rounded", py_rounded, METH_VARARGS, "Codes of values, what these are read back as, and what that loses."},
    {"losses", py_losses, METH_VARARGS, "Squares of each row, and of its distance from another."},
    {"count", py_count, METH_VARARGS, "How often each number of bf16 is seen, added to what was there."},
    {"squares", py_squares, METH_VARARGS, "The sum of squares of each row."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "See native.py.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native(void) {
    const char *kernels = std::getenv("SCALEWRIGHT_KERNELS");
    if (kernels && !std::strcmp(kernels, "torch")) {
        PyErr_SetString(PyExc_ImportError, "SCALEWRIGHT_KERNELS=torch does without the compiled loops");
        return nullptr;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddIntConstant(module, "interface", INTERFACE)) Py_CLEAR(module);
    return module;
}
