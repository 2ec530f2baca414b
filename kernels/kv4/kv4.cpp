// The kv4 codec for CPUs: the same bytes as kernels/kv4_reference.py, which says what the steps mean.
//
// 2 * W channels of K, or 2 * W vectors of V, side by side in a vector of 16-bit numbers or two of fp32. What one pass
// leaves for the next stays in the first-level cache, and memory is read and written in runs of 32 or 64 bytes: rows
// lie far apart, and a line of the cache that is fetched for less is fetched again.

#include "extent.h"
#include "words.h"

namespace {

using namespace lanes;

constexpr int SPAN = 256, GROUP = 32, GROUPS = SPAN / GROUP;
constexpr int BLOCK = 32;   // channels of K coded at once
constexpr int TILE = 64;    // vectors of V coded at once
constexpr int PAIR = 2 * W;
constexpr int LINE = 32;    // 16-bit numbers in a line of the cache
constexpr int MOST = 1024;  // head_dim
constexpr int UNIT_SHIFT = 21, UNIT_BASE = (127 - 40) << 2, UNIT_ROUND = (1 << UNIT_SHIFT) - 1;
constexpr std::int32_t LARGEST = 0x4E800000;  // 2**30
constexpr int MOST_STEP = 16, LEAST_VALUE_STEP = 9, PLACE_BIAS = 16;
constexpr std::int16_t NO_STEP = MOST_STEP + 1;  // places of V lie (NO_STEP - step) / 2 units apart
constexpr float PER_STEP = 1 / 15.125, MIDDLE_FINENESS = 32;
constexpr int CANDIDATES = 4;
constexpr float NUDGES[CANDIDATES] = {-9 / 32.0, -3 / 32.0, 3 / 32.0, 9 / 32.0};
constexpr int FINE_BITS = 7;  // values are rounded to this fraction of a step, in bits
constexpr std::int16_t STEP = 1 << FINE_BITS, HALF_STEP = STEP / 2, FRACTION = STEP - 1;

inline F unit_of(I codes) { return floats((codes + UNIT_BASE) << UNIT_SHIFT); }
inline I unit_codes(F reach, I shift) {
    return least(most(((bits(reach) + UNIT_ROUND) >> UNIT_SHIFT) + 4 * shift - UNIT_BASE, I{}), I{} + 255);
}

enum class Kind { KEYS, VALUES };

// The place nearest to a grid whose middle lies so many steps beside `middle`, and what code 0 of a grid there stands
// for, in units. Each product is exact.
template <Kind KIND> inline F place_of(F middle, F step, float nudge) {
    if constexpr (KIND == Kind::KEYS) return within(whole(exact_product_sum(step, all(nudge - 7.5f), middle)), 0, 255);
    F near = exact_product_sum(step, all(nudge), middle);
    return within(whole(near * (2.0f / (NO_STEP - step))), -PLACE_BIAS, PLACE_BIAS - 1);
}
template <Kind KIND> inline F zero_of(F place, F step) {
    if constexpr (KIND == Kind::KEYS) return place;
    return numbers(numbers(exact_product_sum(place, NO_STEP - step, step * -15.0f)) >> 1);
}

// How the values of a group are scaled: they are coded as (x - base) / unit.
struct Scale {
    F base, unit, per_unit;
    Scale(F base, F unit) : base(base), unit(unit), per_unit(1.0f / unit) {}
};

// The grids to choose from for a group in each lane, whose values are between `low` and `high`.
template <Kind KIND> struct Draft {
    F step, places[CANDIDATES];
    I shifts[CANDIDATES];  // of all but the first, from the first on, in fractions of a step
    F start, factor;       // (x - start) * factor: where x lies on the first, in the same fractions

    Draft(const Scale &scale, F low, F high) {
        constexpr int least_step = KIND == Kind::KEYS ? 1 : LEAST_VALUE_STEP;
        constexpr float fineness = STEP;
        step = within(whole(((high - low) * scale.per_unit) * PER_STEP), least_step, MOST_STEP);
        F both = whole((((low - scale.base) + (high - scale.base)) * scale.per_unit) * MIDDLE_FINENESS);
        F middle = both * (0.5f / MIDDLE_FINENESS), per_step = fineness / step;
        for (int c = 0; c < CANDIDATES; c++) places[c] = place_of<KIND>(middle, step, NUDGES[c]);
        F first = zero_of<KIND>(places[0], step);
        for (int c = 1; c < CANDIDATES; c++) shifts[c] = nearest((zero_of<KIND>(places[c], step) - first) * per_step);
        start = first * scale.unit + scale.base;
        factor = (1.0f / (step * scale.unit)) * fineness;
    }
};

// The same of the groups of PAIR channels or vectors.
struct Candidates {
    S step, places[CANDIDATES], shifts[CANDIDATES];
    Wide start, factor;

    Candidates() = default;
    template <Kind KIND>
    Candidates(const Draft<KIND> &low, const Draft<KIND> &high)
        : step(pack(numbers(low.step), numbers(high.step))), start{low.start, high.start},
          factor{low.factor, high.factor} {
        for (int c = 0; c < CANDIDATES; c++) places[c] = pack(numbers(low.places[c]), numbers(high.places[c]));
        for (int c = 1; c < CANDIDATES; c++) shifts[c] = pack(low.shifts[c], high.shifts[c]);
    }
};

// The grid on which a group is coded: its place and step are stored. In fractions of a step, on the first candidate,
// `begin` is where code 0 begins: half a step below its zero.
struct Grid {
    S place, step, begin;
};

// How far numbers lie above the nearest half of a step, in fractions of a step: those of `a` in low bytes, of `b` in
// high ones.
inline Q residues(S a, S b) { return (Q)((a & FRACTION) | (b & FRACTION) << 8) ^ HALF_STEP; }

// The best grid for groups of `length` values, a multiple of 4, in rows `pitch` numbers apart, which become where they
// lie on the first candidate.
//
// A value whose residue is r lies u = r - 64 beside the nearest step. On a grid that is s further on, 0 <= s < 128, it
// lies u - s beside a step or, if that is less than -64, u - s + 128, whose square is less by 256 * (s - r). So the sum
// of the squares grows by n * s**2 - 2 * s * sum(u) - 256 * sum(max(s, r) - r), and sums of bytes are all it takes.
template <bool HALF> inline Grid fit(const Candidates &from, std::uint16_t *x, int pitch, std::int16_t length) {
    S residue[CANDIDATES], sums[CANDIDATES];
    Q bounds[CANDIDATES];
    sums[0] = S{};
    for (int c = 1; c < CANDIDATES; c++) {
        residue[c] = from.shifts[c] & FRACTION;
        bounds[c] = (Q)(residue[c] | residue[c] << 8);
        sums[c] = S{};
    }
    auto place = [&](int i) {
        Wide own = widen<HALF>(load<S>(x + i * pitch));
        S fine = pack(nearest((own.low - from.start.low) * from.factor.low),
                      nearest((own.high - from.start.high) * from.factor.high));
        store(x + i * pitch, fine);
        return fine;
    };
    for (int i = 0; i < length; i += 4) {  // two bytes together are less than 256
        Q a = residues(place(i), place(i + 1)), b = residues(place(i + 2), place(i + 3));
        sums[0] += sums_of_bytes(a + b);
        for (int c = 1; c < CANDIDATES; c++) sums[c] += sums_of_bytes(most(a, bounds[c]) + most(b, bounds[c]));
    }
    Grid best{from.places[0], from.step, S{}};
    I least_low{}, least_high{};
    for (int c = 1; c < CANDIDATES; c++) {
        // s * (n * (s + 128) - 2 * sum(r)) - 256 * sum(max(s, r) - r)
        S s = residue[c], further = sums[c] - sums[0];
        S slope = (s + STEP) * length - 2 * sums[0], gain = S{} - std::int16_t(2 * STEP);
        I growth_low = dot(interleave_low(s, further), interleave_low(slope, gain));
        I growth_high = dot(interleave_high(s, further), interleave_high(slope, gain));
        S better = pack(growth_low < least_low, growth_high < least_high);
        best.place = better ? from.places[c] : best.place;
        best.begin = better ? from.shifts[c] : best.begin;
        least_low = least(growth_low, least_low);
        least_high = least(growth_high, least_high);
    }
    best.begin -= HALF_STEP;
    return best;
}

// The codes of a group of `length` numbers in rows `pitch` apart: rows of bytes, `stride` apart, of two codes each.
inline void write_codes(const std::uint16_t *x, int pitch, int length, const Grid &grid, int stride,
                        std::uint8_t *codes) {
    // Two rows, each code in the upper half of a byte: what is below or above all codes is clamped.
    auto sixteenths = [&](int i) { return (load<S>(x + i * pitch) - grid.begin) >> (FINE_BITS - 4); };
    auto two = [&](int i) { return clamped_bytes(sixteenths(i), sixteenths(i + 1)); };
    int half = length / 2;
    for (int i = 0; i < half; i += 2)
        store_rows(codes + i * stride, codes + (i + 1) * stride, two(i) >> 4 | (two(i + half) & 0xF0));
}

inline bool sound(Wide x) {
    return largest(most(bits(x.low) & 0x7FFFFFFF, bits(x.high) & 0x7FFFFFFF)) <= LARGEST;
}

// A block's coded tokens, and which rows are stored of the groups, pairs of groups and codes of whole spans.
struct KeyRows {
    long tokens, lead, channels;  // lead: of the first token in its span
    long groups[2], pairs[2], codes[2];

    long spans() const { return (lead + tokens + SPAN - 1) / SPAN; }
};

// Where K is stored, or is to be.
template <typename Byte, typename Sixteen> struct KeySections {
    Sixteen *bases;
    Byte *units, *zeros, *steps, *codes;
};

// The parameters and codes of WIDTH channels of a span, all its rows.
template <int WIDTH> struct KeyBlock {
    alignas(ALIGNMENT) std::uint16_t bases[BLOCK];
    alignas(ALIGNMENT) std::uint8_t units[BLOCK], zeros[GROUPS * BLOCK], steps[GROUPS / 2 * BLOCK],
        codes[SPAN / 2 * BLOCK];

    // Calls `copy(own bytes, stored bytes, number)` for what is stored from `column` on.
    template <typename Sections, typename Copy>
    void each_row(const KeyRows &rows, const Sections &stored, long span, long column, Copy copy) {
        long at = span * rows.channels + column;
        copy(bases, stored.bases + at, 2 * WIDTH);
        copy(units, stored.units + at, WIDTH);
        auto some = [&](std::uint8_t *own, auto section, int count, const long *kept) {
            long first = span * count;
            for (long row = std::max(first, kept[0]); row < std::min(first + count, kept[1]); row++)
                copy(own + (row - first) * BLOCK, section + (row - kept[0]) * rows.channels + column, WIDTH);
        };
        some(zeros, stored.zeros, GROUPS, rows.groups);
        some(steps, stored.steps, GROUPS / 2, rows.pairs);
        some(codes, stored.codes, SPAN / 2, rows.codes);
    }
};

// What bounds PAIR channels of a span.
struct KeyBounds {
    S lows[GROUPS], highs[GROUPS];
    Extent<H2> span;
};

// Code PAIR channels of a span, out of rows of BLOCK, which are overwritten; calls `meanwhile(g)` at each group. False:
// there are values that are not finite or too large.
template <bool HALF, int WIDTH, typename Meanwhile>
bool quantise(std::uint16_t *k, const KeyBounds &bounds, KeyBlock<WIDTH> &block, int column, Meanwhile meanwhile) {
    H2 lowest = bounds.span.lowest(), highest = bounds.span.highest();
    Wide base = widen<HALF>((S)lowest), top = widen<HALF>((S)highest);
    I low_unit = unit_codes(top.low - base.low, I{} - 8), high_unit = unit_codes(top.high - base.high, I{} - 8);
    store(block.bases + column, lowest);
    store_bytes(block.units + column, pack(low_unit, high_unit));
    Scale low(base.low, unit_of(low_unit)), high(base.high, unit_of(high_unit));
    Candidates candidates[GROUPS];  // of all groups first: each is a long chain of operations
    for (int g = 0; g < GROUPS; g++) {
        Wide from = widen<HALF>(bounds.lows[g]), to = widen<HALF>(bounds.highs[g]);
        candidates[g] = {Draft<Kind::KEYS>(low, from.low, to.low), Draft<Kind::KEYS>(high, from.high, to.high)};
    }
    S even_steps{};
    for (int g = 0; g < GROUPS; g++) {
        meanwhile(g);
        std::uint16_t *own = k + g * GROUP * BLOCK;
        Grid grid = fit<HALF>(candidates[g], own, BLOCK, GROUP);
        write_codes(own, BLOCK, GROUP, grid, BLOCK, block.codes + g * GROUP / 2 * BLOCK + column);
        store_bytes(block.zeros + g * BLOCK + column, grid.place);
        S steps = grid.step - 1;
        if (g % 2) store_bytes(block.steps + g / 2 * BLOCK + column, even_steps | steps << 4);
        even_steps = steps;
    }
    return sound(base) && sound(top);
}

template <bool HALF, int WIDTH>
bool quantise_keys(const std::uint16_t *k, const KeyRows &rows,
                   const KeySections<std::uint8_t, std::uint16_t> &to, long span, long column) {
    constexpr int RUNS = (WIDTH + PAIR - 1) / PAIR;
    alignas(ALIGNMENT) std::uint16_t raw[SPAN * BLOCK];
    auto row = [&](int i) {  // the nearest token stands for each missing one
        return k + std::clamp(span * SPAN - rows.lead + i, 0L, rows.tokens - 1) * rows.channels + column;
    };
    KeyBounds bounds[RUNS];
    for (int g = 0; g < GROUPS; g++) {
        Extent<H2> group[RUNS];
        for (int i = g * GROUP; i < (g + 1) * GROUP; i++)
            for (int run = 0; run < RUNS; run++) {
                H2 values{};
                std::memcpy(&values, row(i) + run * PAIR, 2 * std::min(WIDTH, PAIR));
                group[run] |= Extent<H2>(values);
                store(raw + i * BLOCK + run * PAIR, values);
            }
        for (int run = 0; run < RUNS; run++) {
            bounds[run].lows[g] = (S)group[run].lowest();
            bounds[run].highs[g] = (S)group[run].highest();
            bounds[run].span |= group[run];
        }
    }
    KeyBlock<WIDTH> block;
    bool fine = true;
    for (int run = 0; run < RUNS; run++)
        fine &= quantise<HALF>(raw + run * PAIR, bounds[run], block, run * PAIR, [=](int g) {
            // Fetch the block beside this one: its rows are too far apart for the processor to do so by itself.
            for (int i = run; i < GROUP; i += RUNS) __builtin_prefetch(row(g * GROUP + i) + BLOCK);
        });
    block.each_row(rows, to, span, column, [](auto own, auto stored, int count) { std::memcpy(stored, own, count); });
    return fine;
}

// Decode PAIR channels of a span into rows that lie `pitch` apart. False: no encoder wrote this.
template <bool HALF, int WIDTH>
bool dequantise(const KeyBlock<WIDTH> &from, int column, std::uint16_t *k, long pitch) {
    Wide base = widen<HALF>(load<S>(from.bases + column));
    auto [low_code, high_code] = wide(load_bytes(from.units + column));
    F low_unit = unit_of(low_code), high_unit = unit_of(high_code);
    for (int g = 0; g < GROUPS; g++) {
        S steps = load_bytes(from.steps + g / 2 * BLOCK + column) >> (g % 2 * 4);
        auto [low_steps, high_steps] = wide((steps & 15) + 1);
        auto [low_zeros, high_zeros] = wide(load_bytes(from.zeros + g * BLOCK + column));
        F low_step = numbers(low_steps) * low_unit, high_step = numbers(high_steps) * high_unit;
        F low_zero = exact_product_sum(numbers(low_zeros), low_unit, base.low);
        F high_zero = exact_product_sum(numbers(high_zeros), high_unit, base.high);
        auto put = [&](int token, S codes) {
            auto [low, high] = wide(codes);
            Wide values{exact_product_sum(numbers(low), low_step, low_zero),
                        exact_product_sum(numbers(high), high_step, high_zero)};
            store(k + (g * GROUP + token) * pitch, narrow<HALF>(values));
        };
        for (int i = 0; i < GROUP / 2; i++) {
            S codes = load_bytes(from.codes + (g * GROUP / 2 + i) * BLOCK + column);
            put(i, codes & 15);
            put(i + GROUP / 2, codes >> 4);
        }
    }
    return sound(base);
}

template <bool HALF, int WIDTH>
bool dequantise_keys(std::uint16_t *k, const KeyRows &rows,
                     const KeySections<const std::uint8_t, const std::uint16_t> &from, long span, long column) {
    KeyBlock<WIDTH> block;
    long begin = span * SPAN - rows.lead, end = begin + SPAN;
    auto copy_in = [](auto own, auto stored, int count) { std::memcpy(own, stored, count); };
    bool fine = true;
    if (WIDTH >= PAIR && begin >= 0 && end <= rows.tokens) {
        block.each_row(rows, from, span, column, copy_in);
        std::uint16_t *own = k + begin * rows.channels + column;
        for (int c = 0; c < WIDTH; c += PAIR) fine &= dequantise<HALF>(block, c, own + c, rows.channels);
        return fine;
    }
    std::memset(&block, 0, sizeof block);
    block.each_row(rows, from, span, column, copy_in);
    alignas(ALIGNMENT) std::uint16_t whole[SPAN * BLOCK];
    for (int c = 0; c < WIDTH; c += PAIR) fine &= dequantise<HALF>(block, c, whole + c, BLOCK);
    for (long token = std::max(begin, 0L); token < std::min(end, rows.tokens); token++)
        std::memcpy(k + token * rows.channels + column, whole + (token - begin) * BLOCK, 2 * WIDTH);
    return fine;
}

// Calls `one(span, first channel, how many)` for each block of channels of each span; how many is a constant.
template <typename One> int each_key_block(const KeyRows &rows, int threads, One one) {
    long blocks = (rows.channels + BLOCK - 1) / BLOCK;
    return each(rows.spans() * blocks, threads, [=](long item) {
        long span = item / blocks, column = item % blocks * BLOCK;
        if (rows.channels - column >= BLOCK) return one(span, column, std::integral_constant<int, BLOCK>());
        return one(span, column, std::integral_constant<int, BLOCK / 2>());
    });
}

// Sylvester's matrix times COUNT rows, whole numbers.
template <int COUNT, typename T> inline void butterflies(T *x) {
    for (int distance = 1; distance < COUNT; distance *= 2)
        for (int i = 0; i < COUNT; i++)
            if (!(i & distance)) {
                T a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
}

// Calls `one` with `count`, a power of two up to 16, as a constant.
template <typename One> inline void with_constant(int count, One one) {
    switch (count) {
    case 1: return one(std::integral_constant<int, 1>());
    case 2: return one(std::integral_constant<int, 2>());
    case 4: return one(std::integral_constant<int, 4>());
    case 8: return one(std::integral_constant<int, 8>());
    default: return one(std::integral_constant<int, 16>());
    }
}

// Sylvester's matrix times each run of channels that are rotated together, of which each 8 already are; calls
// `put(channel, numbers)` for the products, times 2**16. Whole numbers of at most 256 remain below 2**15 while 64 of
// them are added.
template <typename Put> inline void rotate(S *x, int head_dim, Put put) {
    int together = head_dim & -head_dim, near = std::min(together, 64);
    with_constant(near / 8, [&](auto count) {
        for (int first = 0; first < head_dim; first += near)
            for (int c = first; c < first + 8; c++) {
                S own[count];
                for (int i = 0; i < count; i++) own[i] = x[c + i * 8];
                butterflies<count>(own);
                for (int i = 0; i < count; i++) x[c + i * 8] = own[i];
            }
    });
    with_constant(together / near, [&](auto count) {
        for (int first = 0; first < head_dim; first += together)
            for (int c = first; c < first + near; c++) {
                F low[count], high[count];
                for (int i = 0; i < count; i++) {
                    Wide own = numbers_by_2_16(x[c + i * near]);
                    low[i] = own.low;
                    high[i] = own.high;
                }
                butterflies<count>(low);
                butterflies<count>(high);
                for (int i = 0; i < count; i++) put(c + i * near, Wide{low[i], high[i]});
            }
    });
}

inline int log2_of(int power) { return __builtin_ctz(power); }

// How the parameters and codes of a tile of vectors lie: rows of TILE bytes.
struct Tile {
    int groups, length;
    alignas(ALIGNMENT) std::uint8_t units[TILE], grids[MOST / 16 * TILE];
    alignas(ALIGNMENT) std::uint8_t codes[MOST / 2 * TILE];

    Tile(int head_dim, int groups) : groups(groups), length(head_dim / groups) {}

    // Calls `copy(own bytes, stored bytes, number)` for all rows of sections of `n` vectors, from the vector `first`
    // on; the number is a constant where there are vectors for all of the tile.
    template <typename Bytes, typename Copy>
    void each_row(Bytes all_units, Bytes all_grids, Bytes all_codes, long n, long first, Copy copy) {
        auto each = [&](auto count) {
            copy(units, all_units + first, count);
            for (int i = 0; i < groups; i++) copy(grids + i * TILE, all_grids + i * n + first, count);
            for (int i = 0; i < groups * length / 2; i++) copy(codes + i * TILE, all_codes + i * n + first, count);
        };
        if (n - first >= TILE) each(std::integral_constant<long, TILE>());
        else each(n - first);
    }
};

// PAIR vectors of V where there are fewer.
struct Padded {
    std::uint16_t v[PAIR * MOST];

    const std::uint16_t *filled(const std::uint16_t *from, long count) {
        std::memcpy(v, from, count * sizeof *v);
        std::memset(v + count, 0, sizeof v - count * sizeof *v);
        return v;
    }
};

inline I exponent_of(F reach) { return most(bits(reach) >> 23, I{} + 64); }

// Rotate PAIR vectors, as whole numbers, into rows of bf16, times 2**16. Returns the sizes of their largest values.
template <bool HALF> Wide rotate_values(const std::uint16_t *v, int head_dim, std::uint16_t *rotated) {
    alignas(ALIGNMENT) S x[MOST];
    S worst{};
    for (int c = 0; c < head_dim; c += 8) {
        for (int i = 0; i < 8; i++) x[c + i] = load_eights(v + i * head_dim + c, 8 * head_dim);
        transpose(x + c);
        for (int i = 0; i < 8; i++) worst = most(worst, x[c + i] & 0x7FFF);
        // Fetch as much of the next vectors.
        for (int i = 0; i < 8 * PAIR; i += LINE) __builtin_prefetch(v + PAIR * (head_dim + c) + i);
    }
    Wide reach = widen<HALF>(worst);
    F low_scale = power_of_two(134 - exponent_of(reach.low)), high_scale = power_of_two(134 - exponent_of(reach.high));
    for (int c = 0; c < head_dim; c += 8) {
        S own[8];
        for (int i = 0; i < 8; i++) {
            Wide value = widen<HALF>(x[c + i]);
            own[i] = pack(nearest(value.low * low_scale), nearest(value.high * high_scale));
        }
        butterflies<8>(own);
        for (int i = 0; i < 8; i++) x[c + i] = own[i];
    }
    rotate(x, head_dim, [&](int c, Wide own) { store(rotated + c * PAIR, narrow<false>(own)); });
    return reach;
}

// Code PAIR rotated vectors, whose rows are overwritten, at `at` in the tile.
inline void code_rotated(std::uint16_t *x, Wide reach, int head_dim, int at, Tile &tile) {
    S lows[MOST / 16], highs[MOST / 16];
    Extent<H2> all;
    for (int g = 0; g < tile.groups; g++) {
        Extent<H2> group;
#pragma GCC unroll 4
        for (int c = g * tile.length; c < (g + 1) * tile.length; c++) group |= Extent<H2>(load<H2>(x + c * PAIR));
        lows[g] = (S)group.lowest();
        highs[g] = (S)group.highest();
        all |= group;
    }
    Wide lowest = widen<false>((S)all.lowest()), highest = widen<false>((S)all.highest());
    int doublings = log2_of(head_dim & -head_dim);
    I low_shift = exponent_of(reach.low) - 150 - doublings, high_shift = exponent_of(reach.high) - 150 - doublings;
    I low_unit = unit_codes(most(-lowest.low, highest.low), low_shift - 7);
    I high_unit = unit_codes(most(-lowest.high, highest.high), high_shift - 7);
    store_bytes(tile.units + at, pack(low_unit, high_unit));
    Scale low(F{}, unit_of(low_unit) * power_of_two(-low_shift));
    Scale high(F{}, unit_of(high_unit) * power_of_two(-high_shift));
    Candidates candidates[MOST / 16];
    for (int g = 0; g < tile.groups; g++) {
        Wide from = widen<false>(lows[g]), to = widen<false>(highs[g]);
        candidates[g] = {Draft<Kind::VALUES>(low, from.low, to.low), Draft<Kind::VALUES>(high, from.high, to.high)};
    }
    for (int g = 0; g < tile.groups; g++) {
        std::uint16_t *own = x + g * tile.length * PAIR;
        Grid grid = fit<false>(candidates[g], own, PAIR, tile.length);
        store_bytes(tile.grids + g * TILE + at, (grid.step - LEAST_VALUE_STEP) | (grid.place + PLACE_BIAS) << 3);
        write_codes(own, PAIR, tile.length, grid, TILE, tile.codes + g * tile.length / 2 * TILE + at);
    }
}

// Code PAIR vectors, at `at` in the tile. False: there are values that are not finite or too large.
template <bool HALF> bool quantise_values(const std::uint16_t *v, int head_dim, int at, Tile &tile) {
    alignas(ALIGNMENT) std::uint16_t rotated[MOST * PAIR];
    Wide reach = rotate_values<HALF>(v, head_dim, rotated);
    code_rotated(rotated, reach, head_dim, at, tile);
    return sound(reach);
}

// Decode PAIR vectors, from `at` in the tile.
template <bool HALF> void dequantise_values(const Tile &tile, int at, int head_dim, std::uint16_t *v) {
    alignas(ALIGNMENT) S x[MOST];
    int half = tile.length / 2;
    for (int g = 0; g < tile.groups; g++) {
        S grids = load_bytes(tile.grids + g * TILE + at);
        S steps = (grids & 7) + LEAST_VALUE_STEP, places = (grids >> 3) - PLACE_BIAS;
        S zeros = (places * (NO_STEP - steps) - steps * 15) >> 1;
        S *own = x + g * tile.length;
        for (int i = 0; i < half; i++) {
            S codes = load_bytes(tile.codes + (g * half + i) * TILE + at);
            own[i] = (codes & 15) * steps + zeros;
            own[i + half] = (codes >> 4) * steps + zeros;
        }
    }
    for (int c = 0; c < head_dim; c += 8) {
        butterflies<8>(x + c);
        // Fetch what will be written.
        for (int i = 0; i < 8 * PAIR; i += LINE) __builtin_prefetch(v + PAIR * c + i, 1);
    }
    auto [low_code, high_code] = wide(load_bytes(tile.units + at));
    F low_unit = unit_of(low_code) * 0x1p-16f, high_unit = unit_of(high_code) * 0x1p-16f;
    rotate(x, head_dim, [&](int c, Wide own) {
        x[c] = narrow<HALF>(Wide{rounded_to_bf16(own.low) * low_unit, rounded_to_bf16(own.high) * high_unit});
    });
    for (int c = 0; c < head_dim; c += 8) {
        transpose(x + c);
        for (int i = 0; i < 8; i++) store_eights(v + i * head_dim + c, 8 * head_dim, x[c + i]);
    }
}

}  // namespace

// All take channels and head_dim in multiples of 16, head_dim up to 1024 in groups of a multiple of 4 (64 at most), and
// return 0 where values are not finite or too large, or where no encoder wrote what is to be decoded.
extern "C" {

int kv4_quantise_keys(int half, const std::uint16_t *k, const KeyRows *rows, std::uint16_t *bases, std::uint8_t *units,
                      std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes, int threads) {
    KeySections<std::uint8_t, std::uint16_t> to{bases, units, zeros, steps, codes};
    return each_key_block(*rows, threads, [=](long span, long column, auto width) {
        auto code = half ? quantise_keys<true, width.value> : quantise_keys<false, width.value>;
        return code(k, *rows, to, span, column);
    });
}

int kv4_quantise_values(int half, const std::uint16_t *v, long n, int head_dim, int groups, std::uint8_t *units,
                        std::uint8_t *grids, std::uint8_t *codes, int threads) {
    auto code = half ? quantise_values<true> : quantise_values<false>;
    return each((n + TILE - 1) / TILE, threads, [=](long item) {
        Tile tile(head_dim, groups);
        long first = item * TILE;
        int count = int(std::min<long>(TILE, n - first));
        bool fine = true;
        for (int i = 0; i < count; i += PAIR) {
            const std::uint16_t *own = v + (first + i) * head_dim;
            Padded padded;
            fine &= code(count - i < PAIR ? padded.filled(own, (count - i) * head_dim) : own, head_dim, i, tile);
        }
        tile.each_row(units, grids, codes, n, first,
                      [](auto own, auto stored, auto count) { std::memcpy(stored, own, count); });
        return fine;
    });
}

int kv4_dequantise_keys(int half, std::uint16_t *k, const KeyRows *rows, const std::uint16_t *bases,
                        const std::uint8_t *units, const std::uint8_t *zeros, const std::uint8_t *steps,
                        const std::uint8_t *codes, int threads) {
    KeySections<const std::uint8_t, const std::uint16_t> from{bases, units, zeros, steps, codes};
    return each_key_block(*rows, threads, [=](long span, long column, auto width) {
        auto decode = half ? dequantise_keys<true, width.value> : dequantise_keys<false, width.value>;
        return decode(k, *rows, from, span, column);
    });
}

int kv4_dequantise_values(int half, std::uint16_t *v, long n, int head_dim, int groups, const std::uint8_t *units,
                          const std::uint8_t *grids, const std::uint8_t *codes, int threads) {
    auto decode = half ? dequantise_values<true> : dequantise_values<false>;
    return each((n + TILE - 1) / TILE, threads, [=](long item) {
        Tile tile(head_dim, groups);
        long first = item * TILE;
        int count = int(std::min<long>(TILE, n - first));
        tile.each_row(units, grids, codes, n, first,
                      [](auto own, auto stored, auto count) { std::memcpy(own, stored, count); });
        for (int i = 0; i < count; i += PAIR) {
            std::uint16_t *own = v + (first + i) * head_dim;
            Padded padded;
            decode(tile, i, head_dim, count - i < PAIR ? padded.v : own);
            if (count - i < PAIR) std::memcpy(own, padded.v, (count - i) * head_dim * sizeof *own);
        }
        return true;  // there are no values that no encoder writes
    });
}
}
