// The kv4 codec for CPUs: the same bytes as kernels/kv4_reference.py, which says what the steps mean.
//
// 2 * W channels of K, or 2 * W vectors of V, side by side in two vectors: the even ones and the odd ones, as 16-bit
// numbers widen. What one pass leaves for the next stays in the first-level cache, and memory is read and written in
// runs of 32 or 64 bytes: rows lie far apart, and a line of the cache that is fetched for less is fetched again.

#include "lanes.h"

namespace {

using namespace lanes;

constexpr int SPAN = 256, GROUP = 32, GROUPS = SPAN / GROUP;
constexpr int BLOCK = 32;   // channels of K coded at once
constexpr int TILE = 64;    // vectors of V coded at once
constexpr int PAIR = 2 * W;
constexpr int MOST = 1024;  // head_dim
constexpr int UNIT_SHIFT = 21, UNIT_BASE = (127 - 40) << 2, UNIT_ROUND = (1 << UNIT_SHIFT) - 1;
constexpr std::int32_t LARGEST = 0x4E800000;  // 2**30
constexpr int MOST_STEP = 16, LEAST_VALUE_STEP = 9, PLACE_BIAS = 16;
constexpr std::int16_t NO_STEP = MOST_STEP + 1;  // places of V lie (NO_STEP - step) / 2 units apart
constexpr float PER_STEP = 1 / 15.125, MIDDLE_FINENESS = 32;
constexpr int CANDIDATES = 4;
constexpr float NUDGES[CANDIDATES] = {-9 / 32.0, -3 / 32.0, 3 / 32.0, 9 / 32.0};
constexpr int FINE_BITS = 7;  // values are rounded to this fraction of a step, in bits

inline F unit_of(I codes) { return floats((codes + UNIT_BASE) << UNIT_SHIFT); }
inline I unit_codes(F reach, I shift) {
    return least(most(((bits(reach) + UNIT_ROUND) >> UNIT_SHIFT) + 4 * shift - UNIT_BASE, I{}), I{} + 255);
}

// The grid on which a group is coded: its place and step are stored. In fractions of a step, on the grid to which its
// values are relative, `shift` is where code 0 begins: half a step below its zero.
struct Grid {
    F place, step;
    S shift;
};

enum class Kind { KEYS, VALUES };

// The place nearest to a grid of such a middle, and what code 0 of a grid there stands for, in units.
template <Kind KIND> inline F place_of(F middle, F step) {
    if constexpr (KIND == Kind::KEYS) return within(whole(middle - step * 7.5f), 0, 255);
    return within(whole(middle * (2.0f / (NO_STEP - step))), -PLACE_BIAS, PLACE_BIAS - 1);
}
template <Kind KIND> inline F zero_of(F place, F step) {
    if constexpr (KIND == Kind::KEYS) return place;
    return numbers(numbers(place * (NO_STEP - step) - step * 15.0f) >> 1);
}

// The grid for `length` values between `low` and `high`, an even number of them, and where they lie beside it: the
// first half of them in the low halves of lanes, the second in the high ones.
template <Kind KIND> inline Grid fit(const F *x, int length, F base, F unit, F low, F high, S *fine) {
    F per_unit = 1.0f / unit;
    constexpr int least_step = KIND == Kind::KEYS ? 1 : LEAST_VALUE_STEP;
    F step = within(whole(((high - low) * per_unit) * PER_STEP), least_step, MOST_STEP);
    F middle = whole((((low - base) + (high - base)) * per_unit) * MIDDLE_FINENESS) * (0.5f / MIDDLE_FINENESS);
    constexpr float fineness = 1 << FINE_BITS;
    constexpr int above = 16 - FINE_BITS;  // of these bits lies the number of the step, which does not matter here
    F places[CANDIDATES], first{};
    S shifts[CANDIDATES], moves[CANDIDATES];
    I squares[CANDIDATES];
    for (int c = 0; c < CANDIDATES; c++) {
        places[c] = place_of<KIND>(middle + step * NUDGES[c], step);
        F zero = zero_of<KIND>(places[c], step);
        if (c == 0) first = zero;
        I shift = nearest((zero - first) * (fineness / step));
        shifts[c] = pairs(shift, shift);
        moves[c] = shifts[c] << above;
        squares[c] = I{};
    }
    F start = first * unit + base, factor = (1.0f / (step * unit)) * fineness;
    int half = length / 2;
    for (int i = 0; i < half; i++) {
        fine[i] = pairs(nearest((x[i] - start) * factor), nearest((x[i + half] - start) * factor));
        // How far they lie off the nearest step: the low bits, with their sign. Half a step may come with either sign,
        // as only squares count.
        S low_bits = fine[i] << above;
        for (int c = 0; c < CANDIDATES; c++) {
            S off = (c == 0 ? low_bits : low_bits - moves[c]) >> above;
            squares[c] += dot(off, off);
        }
    }
    Grid best{places[0], step, shifts[0]};
    I smallest = squares[0];
    for (int c = 1; c < CANDIDATES; c++) {
        I better = squares[c] < smallest;
        best.place = better ? places[c] : best.place;
        best.shift = (S)(better ? (I)shifts[c] : (I)best.shift);
        smallest = least(squares[c], smallest);
    }
    constexpr std::int16_t half_step = 1 << (FINE_BITS - 1);
    best.shift -= half_step;
    return best;
}

// Bytes of two codes each.
inline I codes_of(S fine, const Grid &grid) {
    S both = (fine - grid.shift) >> FINE_BITS;
    return dot(least(most(both, S{}), S{} + 15), pairs(I{} + 1, I{} + 16));
}

inline bool sound(F even, F odd) {
    return largest(most(bits(even) & 0x7FFFFFFF, bits(odd) & 0x7FFFFFFF)) <= LARGEST;
}

inline void store_bytes(void *at, I even, I odd) { store(at, halves(even | (odd << 8))); }

// The codes of the group `g`, in rows of `stride` bytes.
inline void write_codes(const S *even, const S *odd, int half, const Grid &e, const Grid &o, int g, int stride,
                        std::uint8_t *codes) {
    for (int i = 0; i < half; i++)
        store_bytes(codes + (g * half + i) * stride, codes_of(even[i], e), codes_of(odd[i], o));
}

// The bits of fp16 or bf16 as integers in the order of the numbers, and back. NaN comes beyond infinity.
inline S ordered(S x) { return x ^ ((x >> 15) & 0x7FFF); }

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
            for (int i = 0; i < count; i++) {
                long row = span * count + i;
                if (row >= kept[0] && row < kept[1])
                    copy(own + i * BLOCK, section + (row - kept[0]) * rows.channels + column, WIDTH);
            }
        };
        some(zeros, stored.zeros, GROUPS, rows.groups);
        some(steps, stored.steps, GROUPS / 2, rows.pairs);
        some(codes, stored.codes, SPAN / 2, rows.codes);
    }
};

// Code PAIR channels of a span, out of rows of BLOCK. False: there are values that are not finite or too large.
template <bool HALF, int WIDTH> bool quantise(const std::uint16_t *k, KeyBlock<WIDTH> &to, int column) {
    S lows[GROUPS], highs[GROUPS], low_end = S{} + 0x7FFF, high_end = ~low_end;
    for (int g = 0; g < GROUPS; g++) {
        S low = S{} + 0x7FFF, high = ~low;
        for (int i = 0; i < GROUP; i++) {
            S value = ordered(load<S>(k + (g * GROUP + i) * BLOCK));
            low = least(low, value);
            high = most(high, value);
        }
        lows[g] = ordered(low);
        highs[g] = ordered(high);
        low_end = least(low_end, low);
        high_end = most(high_end, high);
    }
    low_end = ordered(low_end);
    high_end = ordered(high_end);
    F even_base = widen_even<HALF>(low_end) + 0.0f, odd_base = widen_odd<HALF>(low_end) + 0.0f;  // never -0
    F even_top = widen_even<HALF>(high_end), odd_top = widen_odd<HALF>(high_end);
    I even_code = unit_codes(even_top - even_base, I{} - 8), odd_code = unit_codes(odd_top - odd_base, I{} - 8);
    F even_unit = unit_of(even_code), odd_unit = unit_of(odd_code);
    store(to.bases + column, narrow<HALF>(even_base, odd_base));
    store_bytes(to.units + column, even_code, odd_code);
    for (int g = 0; g < GROUPS; g++) {
        F even[GROUP], odd[GROUP];
        for (int i = 0; i < GROUP; i++) {
            S value = load<S>(k + (g * GROUP + i) * BLOCK);
            even[i] = widen_even<HALF>(value);
            odd[i] = widen_odd<HALF>(value);
        }
        S even_fine[GROUP / 2], odd_fine[GROUP / 2];
        Grid e = fit<Kind::KEYS>(even, GROUP, even_base, even_unit, widen_even<HALF>(lows[g]),
                                 widen_even<HALF>(highs[g]), even_fine);
        Grid o = fit<Kind::KEYS>(odd, GROUP, odd_base, odd_unit, widen_odd<HALF>(lows[g]), widen_odd<HALF>(highs[g]),
                                 odd_fine);
        write_codes(even_fine, odd_fine, GROUP / 2, e, o, g, BLOCK, to.codes + column);
        store_bytes(to.zeros + g * BLOCK + column, numbers(e.place), numbers(o.place));
        H less = halves((numbers(e.step) - 1) | ((numbers(o.step) - 1) << 8));
        std::uint8_t *pair = to.steps + g / 2 * BLOCK + column;
        store(pair, g % 2 ? load<H>(pair) | (less << 4) : less);
    }
    return sound(even_base, odd_base) && sound(even_top, odd_top);
}

template <bool HALF, int WIDTH>
bool quantise_keys(const std::uint16_t *k, const KeyRows &rows,
                   const KeySections<std::uint8_t, std::uint16_t> &to, long span, long column) {
    alignas(ALIGNMENT) std::uint16_t raw[SPAN * BLOCK];
    KeyBlock<WIDTH> block;
    if constexpr (WIDTH < PAIR) std::memset(raw, 0, sizeof raw);
    for (int i = 0; i < SPAN; i++) {  // the nearest token stands for each missing one
        long token = std::clamp(span * SPAN - rows.lead + i, 0L, rows.tokens - 1);
        std::memcpy(raw + i * BLOCK, k + token * rows.channels + column, 2 * WIDTH);
    }
    bool fine = true;
    for (int c = 0; c < WIDTH; c += PAIR) fine &= quantise<HALF>(raw + c, block, c);
    block.each_row(rows, to, span, column, [](auto own, auto stored, int count) { std::memcpy(stored, own, count); });
    return fine;
}

// Decode a span of WIDTH channels. False: no encoder wrote this.
template <bool HALF, int WIDTH>
bool dequantise_keys(std::uint16_t *k, const KeyRows &rows,
                     const KeySections<const std::uint8_t, const std::uint16_t> &from, long span, long column) {
    KeyBlock<WIDTH> block;
    long begin = span * SPAN - rows.lead;
    if (WIDTH < PAIR || begin < 0 || begin + SPAN > rows.tokens) std::memset(&block, 0, sizeof block);
    block.each_row(rows, from, span, column, [](auto own, auto stored, int count) { std::memcpy(own, stored, count); });
    bool fine = true;
    for (int c = 0; c < WIDTH; c += PAIR) {
        S base = load<S>(block.bases + c);
        F even_base = widen_even<HALF>(base), odd_base = widen_odd<HALF>(base);
        fine &= sound(even_base, odd_base);
        auto load_bytes = [&](const std::uint8_t *at) { return wide(load<H>(at + c)); };
        I units = load_bytes(block.units);
        F even_unit = unit_of(units & 255), odd_unit = unit_of(units >> 8);
        for (int g = 0; g < GROUPS; g++) {
            I steps = load_bytes(block.steps + g / 2 * BLOCK) >> (g % 2 * 4);
            I zeros = load_bytes(block.zeros + g * BLOCK);
            F even_step = numbers((steps & 15) + 1) * even_unit, odd_step = numbers(((steps >> 8) & 15) + 1) * odd_unit;
            F even_zero = exact_product_sum(numbers(zeros & 255), even_unit, even_base);
            F odd_zero = exact_product_sum(numbers(zeros >> 8), odd_unit, odd_base);
            for (int i = 0; i < GROUP / 2; i++) {
                I codes = load_bytes(block.codes + (g * GROUP / 2 + i) * BLOCK);
                auto put = [&](long token, I even, I odd) {
                    if (token < 0 || token >= rows.tokens) return;
                    S values = narrow<HALF>(exact_product_sum(numbers(even & 15), even_step, even_zero),
                                            exact_product_sum(numbers(odd & 15), odd_step, odd_zero));
                    std::memcpy(k + token * rows.channels + column + c, &values, 2 * std::min(PAIR, WIDTH));
                };
                long token = begin + g * GROUP + i;
                put(token, codes, codes >> 8);
                put(token + GROUP / 2, codes >> 4, codes >> 12);
            }
        }
    }
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

// Sylvester's matrix times each run of `together` rows: its butterflies between rows at least `from` apart, over whole
// numbers, so exact in any order.
template <typename T> inline void rotate(T *x, int rows, int together, int from) {
    for (int first = 0; first < rows; first += together) {
        int distance = from;
        for (; distance * 2 < together; distance *= 4)
            for (int i = first; i < first + together; i += 4 * distance)
                for (int j = i; j < i + distance; j++) {
                    T a = x[j], b = x[j + distance], c = x[j + 2 * distance], d = x[j + 3 * distance];
                    T ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
                    x[j] = ab + cd;
                    x[j + distance] = a_b + c_d;
                    x[j + 2 * distance] = ab - cd;
                    x[j + 3 * distance] = a_b - c_d;
                }
        if (distance < together)
            for (int j = first; j < first + distance; j++) {
                T a = x[j], b = x[j + distance];
                x[j] = a + b;
                x[j + distance] = a - b;
            }
    }
}

// Vectors of V, rotated: `even` and `odd` ones of a PAIR, times 2**16.
struct Rotated {
    alignas(ALIGNMENT) S whole[MOST + PAIR];
    alignas(ALIGNMENT) F even[MOST], odd[MOST];

    // Whole numbers of at most 256 remain below 2**15 while 64 of them are added.
    void rotate(int head_dim) {
        int together = head_dim & -head_dim;
        ::rotate(whole, head_dim, std::min(together, 64), 1);
        for (int c = 0; c < head_dim; c++) {
            even[c] = numbers((I)whole[c] << 16);
            odd[c] = numbers((I)whole[c] & -0x10000);
        }
        if (together <= 64) return;
        ::rotate(even, head_dim, together, 64);
        ::rotate(odd, head_dim, together, 64);
    }
};

inline int log2_of(int power) { return __builtin_ctz(power); }

// How the parameters and codes of a tile of vectors lie: rows of TILE bytes.
struct Tile {
    int groups, length;
    alignas(ALIGNMENT) std::uint8_t units[TILE], grids[MOST / 16 * TILE];
    alignas(ALIGNMENT) std::uint8_t codes[MOST / 2 * TILE];

    Tile(int head_dim, int groups) : groups(groups), length(head_dim / groups) {}

    // Calls `copy(own bytes, stored bytes)` for all rows of sections of `n` vectors, from the vector `first` on.
    template <typename Bytes, typename Copy>
    void each_row(Bytes all_units, Bytes all_grids, Bytes all_codes, long n, long first, Copy copy) {
        copy(units, all_units + first);
        for (int i = 0; i < groups; i++) copy(grids + i * TILE, all_grids + i * n + first);
        for (int i = 0; i < groups * length / 2; i++) copy(codes + i * TILE, all_codes + i * n + first);
    }
};

// The first channels of a run of PAIR or, at the end of a vector, half as many.
template <bool WHOLE> inline S load_channels(const std::uint16_t *at) {
    S value{};
    std::memcpy(&value, at, WHOLE ? sizeof value : sizeof value / 2);
    return value;
}

// Calls `one(first channel, whether there are PAIR of them, as a constant)` for each run of channels.
template <typename One> inline void each_run(int head_dim, One one) {
    int c = 0;
    for (; c + PAIR <= head_dim; c += PAIR) one(c, std::true_type());
    if (c < head_dim) one(c, std::false_type());
}

// Fit the grids of all groups of vectors of which `exponent` is that of the largest value, times 2**16.
inline void fit_vectors(const F *x, const Tile &tile, I exponent, int together, I &unit_code, Grid *grids, S *fine) {
    F lows[MOST / 16], highs[MOST / 16], top{};
    for (int g = 0; g < tile.groups; g++) {
        const F *own = x + g * tile.length;
        F low = own[0], high = low;
        for (int i = 1; i < tile.length; i++) low = least(low, own[i]), high = most(high, own[i]);
        lows[g] = low;
        highs[g] = high;
        top = most(top, most(-low, high));
    }
    I shift = exponent - 134 - log2_of(together) - 16;
    unit_code = unit_codes(top, shift - 7);
    F unit = unit_of(unit_code) * power_of_two(-shift);
    for (int g = 0; g < tile.groups; g++) {
        int from = g * tile.length;
        grids[g] = fit<Kind::VALUES>(x + from, tile.length, F{}, unit, lows[g], highs[g], fine + from / 2);
    }
}

// Code `count` vectors, PAIR at most, at `at` in the tile. False: there are values that are not finite or too large.
template <bool HALF>
bool quantise_values(const std::uint16_t *v, int head_dim, int at, int count, Tile &tile) {
    Rotated x;
    S worst{};
    each_run(head_dim, [&](int c, auto whole) {
        for (int i = 0; i < PAIR; i++)
            x.whole[c + i] = i < count ? load_channels<whole.value>(v + i * head_dim + c) : S{};
        transpose(x.whole + c);
        for (int i = 0; i < PAIR; i++) worst = most(worst, x.whole[c + i] & 0x7FFF);
    });
    I even_reach = bits(widen_even<HALF>(worst)), odd_reach = bits(widen_odd<HALF>(worst));
    I even_exponent = most(even_reach >> 23, I{} + 64), odd_exponent = most(odd_reach >> 23, I{} + 64);
    F even_scale = power_of_two(134 - even_exponent), odd_scale = power_of_two(134 - odd_exponent);
    for (int c = 0; c < head_dim; c++)
        x.whole[c] = pairs(nearest(widen_even<HALF>(x.whole[c]) * even_scale),
                           nearest(widen_odd<HALF>(x.whole[c]) * odd_scale));
    x.rotate(head_dim);
    for (int c = 0; c < head_dim; c++) {
        x.even[c] = to_bf16(x.even[c]);
        x.odd[c] = to_bf16(x.odd[c]);
    }
    int together = head_dim & -head_dim;
    I even_code, odd_code;
    Grid even[MOST / 16], odd[MOST / 16];
    S even_fine[MOST / 2], odd_fine[MOST / 2];
    fit_vectors(x.even, tile, even_exponent, together, even_code, even, even_fine);
    fit_vectors(x.odd, tile, odd_exponent, together, odd_code, odd, odd_fine);
    store_bytes(tile.units + at, even_code, odd_code);
    auto byte = [](const Grid &grid) {
        return (numbers(grid.step) - LEAST_VALUE_STEP) | ((numbers(grid.place) + PLACE_BIAS) << 3);
    };
    int half = tile.length / 2;
    for (int g = 0; g < tile.groups; g++) {
        store_bytes(tile.grids + g * TILE + at, byte(even[g]), byte(odd[g]));
        write_codes(even_fine + g * half, odd_fine + g * half, half, even[g], odd[g], g, TILE, tile.codes + at);
    }
    return sound(floats(even_reach), floats(odd_reach));
}

// Decode `count` vectors, PAIR at most, from `at` in the tile.
template <bool HALF>
void dequantise_values(const Tile &tile, int at, int count, int head_dim, std::uint16_t *v) {
    Rotated x;
    int half = tile.length / 2;
    auto load_bytes = [](const std::uint8_t *at) { return widened(load<Bytes>(at)); };
    for (int g = 0; g < tile.groups; g++) {
        S grids = load_bytes(tile.grids + g * TILE + at);
        S steps = (grids & 7) + LEAST_VALUE_STEP, places = (grids >> 3) - PLACE_BIAS;
        S zeros = (places * (NO_STEP - steps) - steps * 15) >> 1;
        S *own = x.whole + g * tile.length;
        for (int i = 0; i < half; i++) {
            S codes = load_bytes(tile.codes + (g * half + i) * TILE + at);
            own[i] = (codes & 15) * steps + zeros;
            own[i + half] = (codes >> 4) * steps + zeros;
        }
    }
    x.rotate(head_dim);
    I units = wide(load<H>(tile.units + at));
    F even_unit = unit_of(units & 255) * 0x1p-16f, odd_unit = unit_of(units >> 8) * 0x1p-16f;
    for (int c = 0; c < head_dim; c++)
        x.whole[c] = narrow<HALF>(to_bf16(x.even[c]) * even_unit, to_bf16(x.odd[c]) * odd_unit);
    each_run(head_dim, [&](int c, auto whole) {
        transpose(x.whole + c);
        for (int i = 0; i < count; i++)
            std::memcpy(v + i * head_dim + c, x.whole + c + i, whole.value ? sizeof(S) : sizeof(S) / 2);
    });
}

}  // namespace

// All take channels and head_dim in multiples of 16, head_dim up to 1024 in groups of even length, and return 0 where
// values are not finite or too large, or where no encoder wrote what is to be decoded.
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
        for (int i = 0; i < count; i += PAIR)
            fine &= code(v + (first + i) * head_dim, head_dim, i, std::min(PAIR, count - i), tile);
        tile.each_row(units, grids, codes, n, first,
                      [=](const std::uint8_t *own, std::uint8_t *stored) { std::memcpy(stored, own, count); });
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
                      [=](std::uint8_t *own, const std::uint8_t *stored) { std::memcpy(own, stored, count); });
        for (int i = 0; i < count; i += PAIR)
            decode(tile, i, std::min(PAIR, count - i), head_dim, v + (first + i) * head_dim);
        return true;  // there are no values that no encoder writes
    });
}
}
