// The loops of _native.cpp, compiled once for each level of the processor, whose vectors have BYTES bytes.
//
// A row is a run of values that one fp32 sum is made of. Sixteen rows are worked on at a time, turned so that their
// values stand side by side: a lane is a row, nothing has to be summed across lanes, and every row is summed in the same
// order whatever the width of the processor's vectors, the number of threads, or the rows beside it.

typedef float FloatVector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int16_t ShortVector __attribute__((vector_size(BYTES), aligned(2), may_alias));
typedef int16_t FewShorts __attribute__((vector_size(BYTES < 32 ? BYTES : 32), aligned(2), may_alias));
typedef uint32_t UnsignedVector __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef uint16_t UnsignedShorts __attribute__((vector_size(BYTES), aligned(2), may_alias));
typedef uint16_t FewUnsigned __attribute__((vector_size(BYTES < 32 ? BYTES : 32), aligned(2), may_alias));

constexpr int WIDTH = BYTES / 4;          // of a vector, in floats
constexpr int VECTORS = LANES / WIDTH;  // that sixteen numbers take
#define EACH(i) for (int i = 0; i < VECTORS; i++)

// Sixteen numbers.
struct Floats {
    FloatVector v[VECTORS];
};

INLINE Floats load(const float *from) {
    Floats x;
    EACH(i) x.v[i] = ((const FloatVector *)from)[i];
    return x;
}
INLINE void store(float *to, Floats x) { EACH(i) ((FloatVector *)to)[i] = x.v[i]; }
INLINE Floats splat(float x) {
    Floats all;
    EACH(i) all.v[i] = x - FloatVector{};
    return all;
}
INLINE Floats operator+(Floats a, Floats b) { EACH(i) a.v[i] += b.v[i]; return a; }
INLINE Floats operator-(Floats a, Floats b) { EACH(i) a.v[i] -= b.v[i]; return a; }
INLINE Floats operator*(Floats a, Floats b) { EACH(i) a.v[i] *= b.v[i]; return a; }
INLINE Floats operator/(Floats a, Floats b) { EACH(i) a.v[i] /= b.v[i]; return a; }
INLINE Floats larger(Floats a, Floats b) { EACH(i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE Floats smaller(Floats a, Floats b) { EACH(i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE Floats masked(Floats a, int32_t mask) { EACH(i) a.v[i] = (FloatVector)((IntVector)a.v[i] & mask); return a; }

// Neighbours at a distance of STEP, a power of 2, change places.
template <int STEP, class V, int... I>
INLINE V swapped(V v, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(v, v, (I ^ STEP)...);
}

INLINE IntVector smaller_of(IntVector a, IntVector b) { return a < b ? a : b; }

// The numbers of the places of a vector.
template <int... I>
INLINE IntVector places_of(std::integer_sequence<int, I...>) { return IntVector{I...}; }

// ---- the error of a scale --------------------------------------------------------------------------------------------

struct Grid {
    Floats low, high, smallest_normal, rounder;
};

// The nearest number of the grid, half to even: adding and taking away a number whose last bit is worth the spacing.
template <bool is_float>
INLINE Floats rounded(Floats x, const Grid &grid) {
    Floats code = smaller(larger(x, grid.low), grid.high), unit = grid.rounder;
    if (is_float) unit = unit * larger(masked(code, EXPONENT), grid.smallest_normal);
    return (code + unit) - unit;
}

// log2 and 2 ** x by the polynomials that are nearest where Chebyshev's points lie: together good to 2e-6.
INLINE Floats log2_of(Floats x) {
    EACH(i) {
        IntVector bits = (IntVector)x.v[i], exponent = (bits - 0x3F3504F3) >> 23;  // from sqrt(1/2) to sqrt(2)
        FloatVector m = (FloatVector)(bits - (exponent << 23)) - 1.0f;
        FloatVector slope = 1.442695004f + m * (-0.721347333f + m * (0.480910610f + m * (-0.360704828f + m * (0.287918324f + m * (-0.238920340f + m * (0.215669859f + m * (-0.207421035f + m * 0.126148466f)))))));
        x.v[i] = __builtin_convertvector(exponent, FloatVector) + m * slope;
    }
    return x;
}
INLINE Floats power_of_2(Floats x) {
    x = smaller(larger(x, splat(-126.0f)), splat(127.9f));
    EACH(i) {
        FloatVector whole = (x.v[i] + 12582912.0f) - 12582912.0f, f = x.v[i] - whole;
        FloatVector part = 1.000000000f + f * (0.693147207f + f * (0.240226512f + f * (0.055503272f + f * (0.009618026f + f * (0.001340043f + f * 0.000154697f)))));
        x.v[i] = (FloatVector)((IntVector)part + (__builtin_convertvector(whole, IntVector) << 23));
    }
    return x;
}

struct Power {
    Floats norm, curve[TERMS];
};

// |u| ** norm; norms that are no whole number are computed, or a polynomial stands in.
template <int power>
INLINE Floats raised(Floats u, const Power &norm) {
    if (power == 2) return u * u;
    Floats magnitude = masked(u, MAGNITUDE);
    if (power == 1) return magnitude;
    if (power == 3) return magnitude * (u * u);
    if (power == 4) return (u * u) * (u * u);
    if (power == CURVE) {
        Floats value = norm.curve[TERMS - 1];
        for (int i = TERMS - 2; i >= 0; i--) value = value * magnitude + norm.curve[i];
        return value * magnitude;
    }
    Floats result = power_of_2(norm.norm * log2_of(larger(magnitude, splat(TINY))));
    EACH(i) result.v[i] = magnitude.v[i] == 0.0f ? magnitude.v[i] : result.v[i];
    return result;
}

// ---- rows, side by side ----------------------------------------------------------------------------------------------

template <int FIRST, int... I>
INLINE FloatVector interleaved(FloatVector a, FloatVector b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (FIRST + I / 2 + (I % 2 ? (int)sizeof...(I) : 0))...);
}

// A square of values whose rows become columns: taking by turns from both halves of the rows, until all have had theirs.
INLINE void turn_square(const float *x, int64_t row_size, float *tile) {
    constexpr std::make_integer_sequence<int, WIDTH> all{};
    FloatVector from[WIDTH], to[WIDTH];
#pragma GCC unroll 16
    for (int k = 0; k < WIDTH; k++) from[k] = *(const FloatVector *)(x + k * row_size);
#pragma GCC unroll 16
    for (int done = 1; done < WIDTH; done *= 2) {
#pragma GCC unroll 16
        for (int k = 0; k < WIDTH / 2; k++) {
            to[2 * k] = interleaved<0>(from[k], from[k + WIDTH / 2], all);
            to[2 * k + 1] = interleaved<WIDTH / 2>(from[k], from[k + WIDTH / 2], all);
        }
#pragma GCC unroll 16
        for (int k = 0; k < WIDTH; k++) from[k] = to[k];
    }
#pragma GCC unroll 16
    for (int e = 0; e < WIDTH; e++) *(FloatVector *)(tile + e * LANES) = from[e];
}

// Elements from `start` on of up to 16 rows: tile[e * 16 + row]; an even number of them, the last may be a zero.
static void turn(const float *x, int64_t row_size, int64_t start, int64_t num_elements, int64_t num_rows, float *tile) {
    const int64_t squared = num_rows == LANES ? num_elements / WIDTH * WIDTH : 0;
    for (int64_t e = 0; e < squared; e += WIDTH)
        for (int64_t k = 0; k < LANES; k += WIDTH)
            turn_square(x + k * row_size + start + e, row_size, tile + e * LANES + k);
    for (int64_t k = 0; k < num_rows; k++) {
        const float *row = x + k * row_size + start;
        for (int64_t e = squared; e < num_elements; e++) tile[e * LANES + k] = row[e];
        if (num_elements % 2) tile[num_elements * LANES + k] = 0.0f;
    }
}

// The inverse scales and the zero points of the rows from `first` on, for candidate j.
static void qparams_of(const Measure &job, int64_t first, int64_t num, int64_t j, float *inverse, float *point) {
    const float *scale = job.scale + j * job.positions, *zero = job.point ? job.point + j * job.positions : nullptr;
    if (job.rows_of_position == 1 && num == LANES) {
        store(inverse, load(scale + first)), store(point, zero ? load(zero + first) : splat(0.0f));
    } else {
        for (int64_t k = 0; k < LANES; k++) {
            const int64_t at = (first + (k < num ? k : 0)) / job.rows_of_position;
            inverse[k] = scale[at], point[k] = zero ? zero[at] : 0.0f;
        }
    }
    store(inverse, splat(1.0f) / load(inverse));
}

// Sums over some elements of 16 rows, for candidate j: one vector, or two.
typedef void (*SumLoop)(const Measure &job, const float *x, const float *weights, int64_t elements, const float *inverse,
                        const float *point, int64_t j, float *out);
// What becomes of the sums of 16 rows, which are those of all candidates.
typedef void (*Choice)(const Measure &job, int64_t row, int64_t num, const float *sums);

static void go_over_tiles(const Measure &job, SumLoop loop, int num_sums, Choice choose) {
    std::vector<float> sums(job.candidates * num_sums * LANES);
    alignas(64) float x[CHUNK * LANES] = {0}, weights[CHUNK * LANES] = {0}, inverse[LANES], point[LANES], part[2 * LANES];
    for (int64_t row = job.first; row < job.last; row += LANES) {
        const int64_t num = std::min<int64_t>(LANES, job.last - row);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t start = 0; start < job.row_size; start += CHUNK) {
            const int64_t elements = std::min<int64_t>(CHUNK, job.row_size - start);
            turn(job.x + row * job.row_size, job.row_size, start, elements, num, x);
            if (job.weights) turn(job.weights + row * job.row_size, job.row_size, start, elements, num, weights);
            for (int64_t j = 0; j < job.candidates; j++) {
                qparams_of(job, row, num, j, inverse, point);
                loop(job, x, weights, elements, inverse, point, j, part);
                for (int i = 0; i < num_sums; i++) {
                    float *sum = sums.data() + (j * num_sums + i) * LANES;
                    store(sum, load(sum) + load(part + i * LANES));
                }
            }
        }
        if (job.index) {
            choose(job, row, num, sums.data());
            continue;
        }
        for (int64_t j = 0; j < job.candidates; j++)
            for (int i = 0; i < num_sums; i++)
                std::memcpy(job.out + (i * job.candidates + j) * job.rows + row, sums.data() + (j * num_sums + i) * LANES,
                            num * sizeof(float));
    }
}

template <bool is_float, int power, bool is_weighted>
static void sum_errors(const Measure &job, const float *x, const float *weights, int64_t elements, const float *inverses,
                       const float *points, int64_t j, float *out) {
    const Grid grid = {splat(job.low), splat(job.high), splat(job.smallest_normal), splat(job.rounder)};
    Power norm = {splat(job.norm), {}};
    for (int i = 0; power == CURVE && i < TERMS; i++) norm.curve[i] = splat(job.curves[j * TERMS + i]);
    const Floats inverse = load(inverses), point = load(points);
    Floats totals[2] = {splat(0.0f), splat(0.0f)};  // one addition would have to wait for the other
    for (int64_t e = 0; e < elements; e += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            Floats steps = load(x + (e + i) * LANES) * inverse + point;
            Floats lost = raised<power>(steps - rounded<is_float>(steps, grid), norm);
            totals[i] = totals[i] + (is_weighted ? lost * load(weights + (e + i) * LANES) : lost);
        }
    store(out, totals[0] + totals[1]);
}

// Writes which candidate loses least (the first of equals) and how much: `sums` are in steps of the scales.
template <int power>
static void choose_least(const Measure &job, int64_t row, int64_t num, const float *sums) {
    const Power norm = {splat(job.norm), {}};
    alignas(64) float least[LANES], scale[LANES];
    alignas(64) int32_t index[LANES];
    Floats best = splat(HUGE_VALF), best_index = splat(0.0f);
    for (int64_t j = 0; j < job.candidates; j++) {
        store(scale, splat(1.0f));
        std::memcpy(scale, job.scale + j * job.positions + row, num * sizeof(float));
        const Floats error = load(sums + j * LANES) * raised<power>(smaller(load(scale), splat(job.largest_scale)), norm);
        EACH(i) {
            const IntVector is_less = error.v[i] < best.v[i];
            best.v[i] = is_less ? error.v[i] : best.v[i];
            best_index.v[i] = is_less ? (float)j - FloatVector{} : best_index.v[i];
        }
    }
    store(least, best);
    EACH(i) ((IntVector *)index)[i] = __builtin_convertvector(best_index.v[i], IntVector);
    for (int64_t k = 0; k < num; k++) job.index[row + k] = index[k];
    std::memcpy(job.out + row, least, num * sizeof(float));
}

template <int power>
static void errors_of_power(const Measure &job) {
    const bool is_float = job.smallest_normal > 0;
    const SumLoop loop = job.weights ? (is_float ? sum_errors<true, power, true> : sum_errors<false, power, true>)
                                     : (is_float ? sum_errors<true, power, false> : sum_errors<false, power, false>);
    go_over_tiles(job, loop, 1, choose_least<power == CURVE ? ANY : power>);
}

static void errors(const Measure &job) {
    if (job.curves) errors_of_power<CURVE>(job);
    else if (job.norm == 2) errors_of_power<2>(job);
    else if (job.norm == 1) errors_of_power<1>(job);
    else if (job.norm == 3) errors_of_power<3>(job);
    else if (job.norm == 4) errors_of_power<4>(job);
    else errors_of_power<ANY>(job);
}

template <bool is_weighted>
static void sum_scores(const Measure &job, const float *x, const float *weights, int64_t elements, const float *inverses,
                       const float *points, int64_t, float *out) {
    const Floats inverse = load(inverses), point = load(points);
    const Grid grid = {splat(job.low) - point, splat(job.high) - point, splat(job.smallest_normal), splat(job.rounder)};
    Floats products[2], squares[2];
    for (int i = 0; i < 2; i++) products[i] = squares[i] = splat(0.0f);
    for (int64_t e = 0; e < elements; e += 2)
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            const Floats value = load(x + (e + i) * LANES), code = rounded<false>(value * inverse, grid);
            const Floats weighted = is_weighted ? code * load(weights + (e + i) * LANES) : code;
            products[i] = products[i] + weighted * value, squares[i] = squares[i] + weighted * code;
        }
    store(out, products[0] + products[1]), store(out + LANES, squares[0] + squares[1]);
}

static void scores(const Measure &job) {
    go_over_tiles(job, job.weights ? sum_scores<true> : sum_scores<false>, 2, nullptr);
}

// ---- looked up in a chart --------------------------------------------------------------------------------------------

template <int width, bool is_weighted>
INLINE void chart_of(const Chart &job) {
    for (int64_t row = job.first; row < job.last; row++) {
        const int64_t p = row / job.rows_of_position;
        const Floats factor = splat(job.factor[p]), zero = splat(job.zero[p]);
        const Floats lowest = splat(job.base[p]), highest = splat(job.base[p] + (job.bins - 1));
        const float *x = job.x + row * job.row_size, *weights = is_weighted ? job.weights + row * job.row_size : nullptr;
        Floats sums[width];
#pragma GCC unroll 4
        for (int v = 0; v < width; v++) sums[v] = splat(0.0f);
        for (int64_t e = 0; e < job.row_size; e += LANES) {
            const int64_t num = std::min<int64_t>(LANES, job.row_size - e);
            alignas(64) float values[LANES] = {0};
            int32_t places[LANES];
            if (num < LANES) std::memcpy(values, x + e, num * sizeof(float));
            Floats place = smaller(larger(load(num < LANES ? values : x + e) * factor + zero, lowest), highest);
            EACH(i) ((IntVector *)places)[i] = __builtin_convertvector(place.v[i], IntVector) * (width * LANES);
            for (int64_t k = 0; k < num; k++) {
                const float *line = job.table + places[k];
#pragma GCC unroll 4
                for (int v = 0; v < width; v++) {
                    const Floats numbers = load(line + v * LANES);
                    sums[v] = sums[v] + (is_weighted ? numbers * splat(weights[e + k]) : numbers);
                }
            }
        }
        if (job.index) {
            // Sums that are equal but for their last bits are equal: the number of the column stands in these.
            constexpr std::make_integer_sequence<int, WIDTH> all{};
            IntVector least = INT32_MAX - IntVector{};
#pragma GCC unroll 4
            for (int v = 0; v < width; v++) EACH(i) {
                const IntVector column = places_of(all) + (v * LANES + i * WIDTH);
                const IntVector packed = ((IntVector)sums[v].v[i] & -MOST_COLUMNS) | column;
                least = (column < (int32_t)job.used) & (packed < least) ? packed : least;
            }
            if constexpr (WIDTH > 8) least = smaller_of(least, swapped<8>(least, all));
            if constexpr (WIDTH > 4) least = smaller_of(least, swapped<4>(least, all));
            least = smaller_of(least, swapped<2>(least, all));
            const int32_t best = smaller_of(least, swapped<1>(least, all))[0];
            job.index[row] = best & (MOST_COLUMNS - 1);
            std::memcpy(job.out + row, &best, sizeof best);
        } else {
#pragma GCC unroll 4
            for (int v = 0; v < width; v++) store(job.out + row * width * LANES + v * LANES, sums[v]);
        }
    }
}

template <bool is_weighted>
INLINE void chart_by_width(const Chart &job) {
    switch (job.columns / LANES) {
        case 1: return chart_of<1, is_weighted>(job);
        case 2: return chart_of<2, is_weighted>(job);
        case 3: return chart_of<3, is_weighted>(job);
        default: return chart_of<4, is_weighted>(job);
    }
}

static void chart(const Chart &job) { job.weights ? chart_by_width<true>(job) : chart_by_width<false>(job); }

// ---- the ends of rows ------------------------------------------------------------------------------------------------

// A float is a sign and a magnitude. So the largest float has the largest signed integer for its bits, unless all are
// negative; and the least one the largest unsigned integer, if one is negative. NaNs lie beyond the infinities.

template <class V>
INLINE V largest_of(V a, V b) { return a > b ? a : b; }

// Half of `a` and half of `b`, from START on.
template <int START, class V, int... I>
INLINE V halves(V a, V b, std::integer_sequence<int, I...>) {
    constexpr int HALF = sizeof...(I) / 2;
    return __builtin_shufflevector(a, b, (START + (I < HALF ? I : I + HALF))...);
}

// The largest number of `a` in every place of the first half of a vector, and that of `b` in the second.
template <class One, class V>
INLINE V largest_of_each(V a, V b) {
    constexpr int NUMBERS = sizeof(V) / sizeof(One);
    constexpr std::make_integer_sequence<int, NUMBERS> all{};
    V v = largest_of(halves<0>(a, b, all), halves<NUMBERS / 2>(a, b, all));
    if constexpr (NUMBERS > 16) v = largest_of(v, swapped<8>(v, all));
    if constexpr (NUMBERS > 8) v = largest_of(v, swapped<4>(v, all));
    if constexpr (NUMBERS > 4) v = largest_of(v, swapped<2>(v, all));
    return largest_of(v, swapped<1>(v, all));
}

// Templates do not know that a vector may lie anywhere in memory.
template <class V, class One>
INLINE V vector_at(const One *x) {
    V v;
    std::memcpy(&v, x, sizeof v);
    return v;
}

// The largest bits of a row, signed and unsigned; it is as long as a vector or longer.
template <class One, class V, class Unsigned>
INLINE void largest_bits(const One *x, int64_t size, One *as_signed, One *as_unsigned) {
    constexpr int64_t NUMBERS = sizeof(V) / sizeof(One);
    constexpr One SIGN = (One)(1ull << (8 * sizeof(One) - 1));
    V high = vector_at<V>(x), other_high = high;
    Unsigned low = (Unsigned)high, other_low = low;
    int64_t i = NUMBERS;
    for (; i + 2 * NUMBERS <= size; i += 2 * NUMBERS) {
        const V a = vector_at<V>(x + i), b = vector_at<V>(x + i + NUMBERS);
        high = largest_of(high, a), low = largest_of(low, (Unsigned)a);
        other_high = largest_of(other_high, b), other_low = largest_of(other_low, (Unsigned)b);
    }
    for (; i < size; i += NUMBERS) {  // the last values may be looked at twice
        const V a = vector_at<V>(x + std::min(i, size - NUMBERS));
        high = largest_of(high, a), low = largest_of(low, (Unsigned)a);
    }
    high = largest_of(high, other_high), low = largest_of(low, other_low);
    const V both = largest_of_each<One>(high, (V)low ^ SIGN);  // which makes signed order of unsigned
    *as_signed = both[0], *as_unsigned = both[NUMBERS / 2] ^ SIGN;
}

// The least of a row's bits, which all have one sign.
template <class One>
INLINE One least_bits(const One *x, int64_t size) {
    One least = x[0];
    for (int64_t i = 1; i < size; i++) least = x[i] < least ? x[i] : least;
    return least;
}

template <class One, class V, class Unsigned>
INLINE void ends_of(const Ends &job) {
    constexpr One MOST = (One)(((1ull << (8 * sizeof(One) - 1)) - 1));  // all bits but the sign
    const One infinity = (One)job.infinity;
    for (int64_t row = job.first; row < job.last; row++) {
        const One *x = (const One *)job.x + row * job.row_size;
        One high, low;
        if (job.row_size < (int64_t)(sizeof(V) / sizeof(One))) {
            typedef std::make_unsigned_t<One> Bits;
            high = low = x[0];
            for (int64_t i = 1; i < job.row_size; i++)
                high = largest_of(high, x[i]), low = (One)largest_of((Bits)low, (Bits)x[i]);
        } else {
            largest_bits<One, V, Unsigned>(x, job.row_size, &high, &low);
        }
        if (high > infinity || (low < 0 && (One)(low & MOST) > infinity)) low = high = infinity + 1;
        else if (low >= 0) low = least_bits(x, job.row_size);
        else if (high < 0) high = least_bits(x, job.row_size);
        if (job.is_widened) {
            ((int32_t *)job.lo)[row] = (int32_t)low * 65536, ((int32_t *)job.hi)[row] = (int32_t)high * 65536;
        } else {
            ((One *)job.lo)[row] = low, ((One *)job.hi)[row] = high;
        }
    }
}

static void ends(const Ends &job) {
    if (!job.is_short) ends_of<int32_t, IntVector, UnsignedVector>(job);
    else if (job.row_size < BYTES / 2) ends_of<int16_t, FewShorts, FewUnsigned>(job);
    else ends_of<int16_t, ShortVector, UnsignedShorts>(job);
}

// ---- the scales of ranges --------------------------------------------------------------------------------------------

// As compressed-tensors has it: the larger magnitude, divided by half of the grid's width; a stand-in for 0.
static void symmetric_scales(const Ranges &job) {
    const Floats half = splat(job.half), zero = splat(0), stand_in = splat(job.stand_in);
    Floats largest = zero;
    int64_t i = job.first;
    for (; i + LANES <= job.last; i += LANES) {
        Floats scale = larger(larger(zero - load(job.lo + i), load(job.hi + i)), zero) / half;
        largest = larger(largest, scale);
        EACH(j) scale.v[j] = scale.v[j] == 0 ? stand_in.v[j] : scale.v[j];
        store(job.out + i, scale);
    }
    float all[LANES];
    store(all, largest);
    float most = *std::max_element(all, all + LANES);
    for (; i < job.last; i++) {
        const float scale = std::max(std::max(-job.lo[i], job.hi[i]), 0.0f) / job.half;
        most = std::max(most, scale);
        job.out[i] = scale == 0 ? job.stand_in : scale;
    }
    *job.largest = most;
}

// ---- weights as they will be read back -------------------------------------------------------------------------------

typedef int8_t ByteVector __attribute__((vector_size(BYTES / 4), aligned(1), may_alias));
typedef uint16_t HalfVector __attribute__((vector_size(BYTES / 2), aligned(2), may_alias));

// Sixteen numbers from fp32 or bf16; and fp32 as the type has it, half to even.
INLINE Floats widened(const float *from) { return load(from); }
INLINE Floats widened(const uint16_t *from) {
    Floats x;
    EACH(i) x.v[i] = (FloatVector)(__builtin_convertvector(((const HalfVector *)from)[i], UnsignedVector) << 16);
    return x;
}
INLINE Floats as_stored(Floats x, const float *) { return x; }
INLINE Floats as_stored(Floats x, const uint16_t *) {
    EACH(i) {
        const UnsignedVector bits = (UnsignedVector)x.v[i];
        x.v[i] = (FloatVector)((bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u);
    }
    return x;
}
INLINE void store_as(float *to, Floats x) { store(to, x); }
INLINE void store_as(uint16_t *to, Floats x) {
    EACH(i) ((HalfVector *)to)[i] = __builtin_convertvector((UnsignedVector)x.v[i] >> 16, HalfVector);
}

// The codes of numbers of the grid: integers, or the bits of e4m3. Zeros of the latter have a sign.
template <bool is_float>
INLINE void store_codes(int8_t *to, Floats numbers) {
    EACH(i) {
        IntVector code = __builtin_convertvector(numbers.v[i], IntVector);
        if (is_float) {
            const IntVector bits = (IntVector)numbers.v[i], magnitude = bits & MAGNITUDE;
            const IntVector few = __builtin_convertvector((FloatVector)magnitude * 512.0f, IntVector);  // subnormal
            code = magnitude < 0x3C800000 ? few : (magnitude >> 20) - (120 << 3);
            code |= (bits >> 24) & 0x80;
        }
        ((ByteVector *)to)[i] = __builtin_convertvector(code, ByteVector);
    }
}

// What some values lose, in fp32, until it is added to the sums of their row: [squares, squares of what is lost].
struct Sums {
    Floats squares, lost;
};

INLINE void add(Sums &sums, Floats value, Floats other) {
    const Floats d = value - other;
    sums.squares = sums.squares + value * value, sums.lost = sums.lost + d * d;
}

INLINE void add_to(double *of_row, const Sums &sums) {
    alignas(64) float parts[2 * LANES];
    store(parts, sums.squares), store(parts + LANES, sums.lost);
    for (int k = 0; k < LANES; k++) of_row[0] += parts[k], of_row[1] += parts[LANES + k];
}

template <bool is_float, class One>
INLINE void round_values(const Rounding &job, const One *x, float of_row, int8_t *codes, One *restored, Sums &sums) {
    const Grid grid = {splat(job.low), splat(job.high), splat(job.smallest_normal), splat(job.rounder)};
    const Floats value = widened(x), scale = splat(of_row), steps = as_stored(value / scale, x);
    Floats number = rounded<is_float>(steps, grid);
    if (is_float) EACH(i) number.v[i] = (FloatVector)((IntVector)number.v[i] | ((IntVector)steps.v[i] & ~MAGNITUDE));
    store_codes<is_float>(codes, number);
    const Floats as_restored = as_stored(number * scale, x);
    add(sums, value, as_restored);
    store_as(restored, as_restored);
}

template <bool is_float, class One>
INLINE void round_rows(const Rounding &job) {
    for (int64_t row = job.first; row < job.last; row++) {
        const One *x = (const One *)job.x + row * job.row_size;
        int8_t *codes = job.codes + row * job.row_size;
        One *restored = (One *)job.restored + row * job.row_size;
        double lost[2] = {0, 0};
        for (int64_t start = 0; start < job.row_size; start += CHUNK * LANES) {
            const int64_t end = std::min<int64_t>(start + CHUNK * LANES, job.row_size);
            Sums sums = {splat(0.0f), splat(0.0f)};
            int64_t e = start;
            for (; e + LANES <= end; e += LANES)
                round_values<is_float>(job, x + e, job.scale[row], codes + e, restored + e, sums);
            if (e < end) {
                const int64_t left = end - e;
                One few[LANES] = {0}, few_restored[LANES];
                int8_t few_codes[LANES];
                std::memcpy(few, x + e, left * sizeof(One));
                round_values<is_float>(job, few, job.scale[row], few_codes, few_restored, sums);
                std::memcpy(codes + e, few_codes, left), std::memcpy(restored + e, few_restored, left * sizeof(One));
            }
            add_to(lost, sums);
        }
        job.lost[2 * row] = lost[0], job.lost[2 * row + 1] = lost[1];
    }
}

static void roundings(const Rounding &job) {
    const bool is_float = job.smallest_normal > 0;
    if (job.is_short) is_float ? round_rows<true, uint16_t>(job) : round_rows<false, uint16_t>(job);
    else is_float ? round_rows<true, float>(job) : round_rows<false, float>(job);
}

// ---- what was lost ---------------------------------------------------------------------------------------------------

template <class One>
INLINE void sum_losses(const Losses &job) {
    for (int64_t row = job.first; row < job.last; row++) {
        const One *x = (const One *)job.x + row * job.row_size, *y = (const One *)job.y + row * job.row_size;
        double lost[2] = {0, 0};
        for (int64_t start = 0; start < job.row_size; start += CHUNK * LANES) {
            const int64_t end = std::min<int64_t>(start + CHUNK * LANES, job.row_size);
            Sums sums = {splat(0.0f), splat(0.0f)};
            for (int64_t e = start; e < end; e += LANES) {
                One few_x[LANES] = {0}, few_y[LANES] = {0};
                const bool is_cut = e + LANES > end;
                if (is_cut) std::memcpy(few_x, x + e, (end - e) * sizeof(One)), std::memcpy(few_y, y + e, (end - e) * sizeof(One));
                add(sums, widened(is_cut ? few_x : x + e), widened(is_cut ? few_y : y + e));
            }
            add_to(lost, sums);
        }
        job.out[2 * row] = lost[0], job.out[2 * row + 1] = lost[1];
    }
}

static void losses(const Losses &job) { job.is_short ? sum_losses<uint16_t>(job) : sum_losses<float>(job); }

// ---- how often values are seen ---------------------------------------------------------------------------------------

// Where the nearest bf16 numbers of sixteen values stand among all of them, by value; those beyond the largest count as it.
INLINE void places_among_bf16(const float *x, int32_t *places) {
    EACH(i) {
        const IntVector bits = ((const IntVector *)x)[i];
        const UnsignedVector magnitude = (UnsignedVector)(bits & MAGNITUDE);
        IntVector code = (IntVector)((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16);  // half to even
        code = code > LARGEST_BF16 ? LARGEST_BF16 - IntVector{} : code;
        ((IntVector *)places)[i] = (code ^ (bits >> 31)) + 0x8000;
    }
}
INLINE void places_among_bf16(const uint16_t *x, int32_t *places) {
    for (int k = 0; k < LANES; k++) places[k] = ((x[k] & 0x7FFF) ^ -(x[k] >> 15)) + 0x8000;
}

template <class One, class Count>
INLINE void count_rows(const Counting &job) {
    for (int64_t row = job.first; row < job.last; row++) {
        const One *x = (const One *)job.x + row * job.row_size;
        Count *table = (Count *)job.out + row % job.positions * NUM_CODES;
        const Count weight = job.weights ? (Count)job.weights[row] : (Count)1;
        alignas(64) int32_t places[LANES];
        for (int64_t e = 0; e < job.row_size; e += LANES) {
            const int64_t count = std::min<int64_t>(LANES, job.row_size - e);
            One few[LANES] = {0};
            if (count < LANES) std::memcpy(few, x + e, count * sizeof(One));
            places_among_bf16(count < LANES ? few : x + e, places);
            for (int64_t k = 0; k < count; k++) table[places[k]] += weight;
        }
    }
}

static void count(const Counting &job) {
    if (job.weights)
        job.is_short ? count_rows<uint16_t, double>(job) : count_rows<float, double>(job);
    else
        job.is_short ? count_rows<uint16_t, int64_t>(job) : count_rows<float, int64_t>(job);
}

typedef double DoubleVector __attribute__((vector_size(2 * BYTES)));

template <class One>
INLINE void square_rows(const Squares &job) {
    for (int64_t row = job.first; row < job.last; row++) {
        const One *x = (const One *)job.x + row * job.row_size;
        DoubleVector sums[VECTORS] = {};
        for (int64_t e = 0; e < job.row_size; e += LANES) {
            One few[LANES] = {0};
            const bool is_cut = e + LANES > job.row_size;
            if (is_cut) std::memcpy(few, x + e, (job.row_size - e) * sizeof(One));
            const Floats values = widened(is_cut ? few : x + e);
            EACH(i) {
                const DoubleVector value = __builtin_convertvector(values.v[i], DoubleVector);
                sums[i] += value * value;
            }
        }
        double sum = 0;
        EACH(i) for (int k = 0; k < WIDTH; k++) sum += sums[i][k];
        job.out[row] = sum;
    }
}

static void squares(const Squares &job) { job.is_short ? square_rows<uint16_t>(job) : square_rows<float>(job); }

#undef BYTES
#undef EACH
