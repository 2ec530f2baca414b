// The kv4 codec for CPUs: the same bytes as kernels/kv4_reference.py, which says what the steps mean.
//
// Sixteen channels of K, or sixteen vectors of V, side by side in the lanes of a vector; each block of them stays in the
// first-level cache from the first look to the codes. Written with the compiler's own vector types, so any width of
// vector unit serves. Must be compiled without contraction of products and sums and without fast-math: the order and
// rounding of the operations is the format.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int W = 16;
typedef float F __attribute__((vector_size(4 * W)));
typedef std::int32_t I __attribute__((vector_size(4 * W)));
typedef std::uint16_t H __attribute__((vector_size(2 * W)));
typedef std::uint8_t B __attribute__((vector_size(W)));

constexpr int SPAN = 256, GROUP = 32, GROUPS = SPAN / GROUP;
constexpr int UNIT_SHIFT = 21, UNIT_BASE = (127 - 40) << 2, UNIT_ROUND = (1 << UNIT_SHIFT) - 1;
constexpr std::int32_t LARGEST = 0x4E800000;  // 2**30
constexpr float PER_STEP = 1 / 15.0, NUDGE = 0.1875f, FINE = 32.0f;
constexpr int MOST = 1024;  // head_dim
constexpr int TILE = 64;    // vectors of V decoded at once: their bytes fill lines of the cache

inline F all(float x) { return F{} + x; }
inline I bits(F x) { return (I)x; }
inline F floats(I x) { return (F)x; }
inline F least(F a, F b) { return a < b ? a : b; }
inline F most(F a, F b) { return a > b ? a : b; }
inline I least(I a, I b) { return a < b ? a : b; }
inline I most(I a, I b) { return a > b ? a : b; }
inline F within(F x, float low, float high) { return least(most(x, all(low)), all(high)); }

// To the nearest whole number, ties to even: exact for what is smaller than 2**22, as everything rounded here is.
inline F whole(F x) {
    constexpr float magic = 12582912.0f;
    return (x + magic) - magic;
}

// To the nearest multiple of FINE, likewise.
inline F coarse(F x) {
    constexpr float magic = 12582912.0f * FINE;
    return (x + magic) - magic;
}

template <typename T> inline T load(const void *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
template <typename T> inline void store(void *at, T value) { std::memcpy(at, &value, sizeof value); }

inline I wide(H x) { return __builtin_convertvector(x, I); }

template <bool HALF> inline F widen(H x) {
    I u = wide(x);
    if constexpr (!HALF) return floats(u << 16);
    // 2**112 rebiases the exponent, subnormal numbers included; infinity and NaN keep an exponent beyond all bounds.
    F scaled = floats((u & 0x7FFF) << 13) * 0x1p112f;
    I beyond = (u & 0x7C00) == 0x7C00;
    return floats(bits(scaled) | (beyond & 0x7F800000) | ((u & 0x8000) << 16));
}

template <bool HALF> inline H narrow(F x) {
    if constexpr (!HALF) {
        I u = bits(x);
        return __builtin_convertvector((u + 0x7FFF + ((u >> 16) & 1)) >> 16, H);
    }
    I sign = (bits(x) >> 16) & 0x8000;
    F size = least(floats(bits(x) & 0x7FFFFFFF), all(65504.0f));
    I u = bits(size);
    F normal = floats((u + 0xFFF + ((u >> 13) & 1)) & -0x2000);
    F rounded = size < all(0x1p-14f) ? (size + 0.5f) - 0.5f : normal;
    return __builtin_convertvector((bits(rounded * 0x1p-112f) >> 13) | sign, H);
}

inline F unit_of(I codes) { return floats((codes + UNIT_BASE) << UNIT_SHIFT); }
inline I unit_codes(F reach, I shift) {
    return least(most(((bits(reach) + UNIT_ROUND) >> UNIT_SHIFT) + 4 * shift - UNIT_BASE, I{}), I{} + 255);
}
inline F power_of_two(I exponent) { return floats((exponent + 127) << 23); }
inline I numbers(F x) { return __builtin_convertvector(x, I); }
inline F numbers(I x) { return __builtin_convertvector(x, F); }
inline B bytes(I x) { return __builtin_convertvector(x, B); }
inline F from_bytes(B x) { return numbers(__builtin_convertvector(x, I)); }

// Zero and step of one group of `length` values in the lanes, and its codes, two in a byte.
struct Group {
    F zero, step;
};

template <int STRIDE>
inline Group code(const F *x, int length, F base, F unit, float from, float to, F low, F high, B *codes) {
    F per_unit = 1.0f / unit;
    F step = within(whole(((high - low) * per_unit) * PER_STEP), 1.0f, 16.0f);
    F both = whole((((low - base) + (high - base)) * per_unit) * FINE) * (0.5f / FINE);
    F centred = both - step * 7.5f, nudge = step * NUDGE;
    F lower = within(whole(centred - nudge), from, to), upper = within(whole(centred + nudge), from, to);
    F per_step = 1.0f / (step * unit);
    F first = lower * unit + base, factor = per_step * FINE;
    F shift = whole((upper - lower) * (FINE / step));
    F plain{}, moved{};
    for (int i = 0; i < length; i++) {
        F fine = whole((x[i * STRIDE] - first) * factor);
        F off = fine - coarse(fine);
        F other = off - shift;
        other = other < all(-FINE / 2) ? other + FINE : other;
        plain += off * off;
        moved += other * other;
    }
    F zero = moved < plain ? upper : lower;
    F start = zero * unit + base;
    int half = (length + 1) / 2;
    for (int i = 0; i < half; i++) {
        F value = within(whole((x[i * STRIDE] - start) * per_step), 0.0f, 15.0f);
        if (i + half < length)
            value += 16.0f * within(whole((x[(i + half) * STRIDE] - start) * per_step), 0.0f, 15.0f);
        codes[i] = bytes(numbers(value));
    }
    return {zero, step};
}

inline bool sound(I reach, std::int32_t largest) {
    std::int32_t most = 0;
    for (int i = 0; i < W; i++) most = std::max(most, reach[i]);
    return most <= largest;
}

template <bool HALF>
bool key_span(const std::uint16_t *k, long n, long column, std::uint16_t *bases, std::uint8_t *units,
              std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes) {
    alignas(64) F x[SPAN];
    F lows[GROUPS], highs[GROUPS];
    I reach{};
    for (int g = 0; g < GROUPS; g++) {
        F low{}, high{};
        for (int i = 0; i < GROUP; i++) {
            F value = widen<HALF>(load<H>(k + (g * GROUP + i) * n + column));
            reach = most(reach, bits(value) & 0x7FFFFFFF);
            low = i ? least(low, value) : value;
            high = i ? most(high, value) : value;
            x[g * GROUP + i] = value;
        }
        lows[g] = low;
        highs[g] = high;
    }
    F base = lows[0], top = highs[0];
    for (int g = 1; g < GROUPS; g++) base = least(base, lows[g]), top = most(top, highs[g]);
    base += 0.0f;  // never -0
    I unit_code = unit_codes(top - base, I{} - 8);
    F unit = unit_of(unit_code), even{};
    store(bases + column, narrow<HALF>(base));
    store(units + column, bytes(unit_code));
    for (int g = 0; g < GROUPS; g++) {
        B packed[GROUP / 2];
        Group found = code<1>(x + g * GROUP, GROUP, base, unit, 0.0f, 255.0f, lows[g], highs[g], packed);
        for (int i = 0; i < GROUP / 2; i++) store(codes + (g * GROUP / 2 + i) * n + column, packed[i]);
        store(zeros + g * n + column, bytes(numbers(found.zero)));
        if (g % 2) store(steps + g / 2 * n + column, bytes(numbers(even + 16.0f * (found.step - 1.0f))));
        even = found.step - 1.0f;
    }
    return sound(reach, LARGEST);
}

inline void transpose(F *rows) {
    const I low1{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, high1 = low1 + 1;
    const I low2{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = low2 + 2;
    const I low4{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, high4 = low4 + 4;
    const I low8{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high8 = low8 + 8;
    auto exchange = [&](int distance, I low, I high) {
        for (int i = 0; i < W; i++)
            if (!(i & distance)) {
                F a = rows[i], b = rows[i + distance];
                rows[i] = __builtin_shuffle(a, b, low);
                rows[i + distance] = __builtin_shuffle(a, b, high);
            }
    };
    exchange(1, low1, high1);
    exchange(2, low2, high2);
    exchange(4, low4, high4);
    exchange(8, low8, high8);
}

// Sylvester's matrix times each run of `together` rows: butterflies over whole numbers, so exact in any order.
inline void rotate(F *x, int rows, int together) {
    for (int from = 0; from < rows; from += together) {
        int distance = 1;
        for (; distance * 2 < together; distance *= 4)
            for (int i = from; i < from + together; i += 4 * distance)
                for (int j = i; j < i + distance; j++) {
                    F a = x[j], b = x[j + distance], c = x[j + 2 * distance], d = x[j + 3 * distance];
                    F ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
                    x[j] = ab + cd;
                    x[j + distance] = a_b + c_d;
                    x[j + 2 * distance] = ab - cd;
                    x[j + 3 * distance] = a_b - c_d;
                }
        if (distance < together)
            for (int j = from; j < from + distance; j++) {
                F a = x[j], b = x[j + distance];
                x[j] = a + b;
                x[j + distance] = a - b;
            }
    }
}

inline F to_bf16(F x) {
    I u = bits(x);
    return floats((u + 0x7FFF + ((u >> 16) & 1)) & -0x10000);
}

template <typename T> inline void store_some(void *at, T value, int count) {
    if (count == W) return store(at, value);
    std::memcpy(at, &value, sizeof value / W * count);
}

inline int log2_of(int power) { return __builtin_ctz(power); }

template <bool HALF>
bool value_block(const std::uint16_t *v, int head_dim, int groups, long n, long first, int count, std::uint8_t *units,
                 std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes) {
    alignas(64) F x[MOST];
    F reach{};
    I worst{};
    for (int c = 0; c < head_dim; c += W) {
        for (int i = 0; i < W; i++)
            x[c + i] = i < count ? widen<HALF>(load<H>(v + (first + i) * head_dim + c)) : F{};
        transpose(x + c);
        for (int i = 0; i < W; i++) worst = most(worst, bits(x[c + i]) & 0x7FFFFFFF);
    }
    reach = floats(worst);
    I exponent = most(bits(reach) >> 23, I{} + 64);
    F scale = power_of_two(134 - exponent);
    for (int c = 0; c < head_dim; c++) x[c] = whole(x[c] * scale);
    int together = head_dim & -head_dim;
    rotate(x, head_dim, together);
    int length = head_dim / groups, half = (length + 1) / 2;
    F lows[MOST / 32 + 1], highs[MOST / 32 + 1], top{};
    for (int g = 0; g < groups; g++) {
        F low{}, high{};
        for (int i = 0; i < length; i++) {
            F value = x[g * length + i] = to_bf16(x[g * length + i]);
            low = i ? least(low, value) : value;
            high = i ? most(high, value) : value;
        }
        lows[g] = low;
        highs[g] = high;
        top = most(top, most(floats(bits(low) & 0x7FFFFFFF), floats(bits(high) & 0x7FFFFFFF)));
    }
    I shift = exponent - 134 - log2_of(together);
    I unit_code = unit_codes(top, shift - 7);
    F unit = unit_of(unit_code) * power_of_two(-shift), even{};
    store_some(units + first, bytes(unit_code), count);
    for (int g = 0; g < groups; g++) {
        B packed[MOST / 2];
        Group found = code<1>(x + g * length, length, F{}, unit, -128.0f, 127.0f, lows[g], highs[g], packed);
        for (int i = 0; i < half; i++) store_some(codes + (long(g) * half + i) * n + first, packed[i], count);
        store_some(zeros + g * n + first, bytes(numbers(found.zero + 128.0f)), count);
        F less = found.step - 1.0f;
        if (g % 2) store_some(steps + g / 2 * n + first, bytes(numbers(even + 16.0f * less)), count);
        else if (g == groups - 1) store_some(steps + g / 2 * n + first, bytes(numbers(less)), count);
        even = less;
    }
    return sound(worst, LARGEST);
}

// Two vectors side by side fill a line of the cache: rows lie far apart, and one fetched for half of it is fetched again.
constexpr int PAIR = 2;

template <bool HALF>
bool key_values(long n, long column, int vectors, const std::uint16_t *bases, const std::uint8_t *units,
                const std::uint8_t *zeros, const std::uint8_t *steps, const std::uint8_t *codes, std::uint16_t *k) {
    F base[PAIR], unit[PAIR], step[PAIR], zero[PAIR];
    I reach{};
    for (int c = 0; c < vectors; c++) {
        base[c] = widen<HALF>(load<H>(bases + column + c * W));
        unit[c] = unit_of(__builtin_convertvector(load<B>(units + column + c * W), I));
        reach = most(reach, bits(base[c]) & 0x7FFFFFFF);
    }
    for (int g = 0; g < GROUPS; g++) {
        for (int c = 0; c < vectors; c++) {
            I packed = __builtin_convertvector(load<B>(steps + g / 2 * n + column + c * W), I);
            step[c] = (numbers((g % 2 ? packed >> 4 : packed & 15)) + 1.0f) * unit[c];
            zero[c] = from_bytes(load<B>(zeros + g * n + column + c * W)) * unit[c] + base[c];
        }
        for (int i = 0; i < GROUP / 2; i++)
            for (int c = 0; c < vectors; c++) {
                I both = __builtin_convertvector(load<B>(codes + (g * GROUP / 2 + i) * n + column + c * W), I);
                std::uint16_t *row = k + (g * GROUP + i) * n + column + c * W;
                store(row, narrow<HALF>(numbers(both & 15) * step[c] + zero[c]));
                store(row + GROUP / 2 * n, narrow<HALF>(numbers(both >> 4) * step[c] + zero[c]));
            }
    }
    return sound(reach, LARGEST);
}

template <bool HALF>
bool vectors(int head_dim, int groups, long n, long first, int count, const std::uint8_t *units,
             const std::uint8_t *zeros, const std::uint8_t *steps, const std::uint8_t *codes, std::uint16_t *v) {
    alignas(64) F x[MOST + W];
    int length = head_dim / groups, half = (length + 1) / 2;
    auto some = [count](const std::uint8_t *at) {
        if (count == W) return load<B>(at);
        B value{};
        std::memcpy(&value, at, count);
        return value;
    };
    F last{};
    for (int g = 0; g < groups; g++) {
        I packed = __builtin_convertvector(some(steps + g / 2 * n + first), I);
        F step = numbers((g % 2 ? packed >> 4 : packed & 15)) + 1.0f;
        F zero = from_bytes(some(zeros + g * n + first)) - 128.0f;
        last = most(last, zero + step * 15.0f);
        for (int i = 0; i < half; i++) {
            I both = __builtin_convertvector(some(codes + (long(g) * half + i) * n + first), I);
            x[g * length + i] = numbers(both & 15) * step + zero;
            if (i + half < length) x[g * length + i + half] = numbers(both >> 4) * step + zero;
        }
    }
    rotate(x, head_dim, head_dim & -head_dim);
    F unit = unit_of(__builtin_convertvector(some(units + first), I));
    for (int c = 0; c < head_dim; c += W) {
        for (int i = 0; i < W; i++) x[c + i] = to_bf16(x[c + i]) * unit;
        transpose(x + c);
        for (int i = 0; i < count; i++) store(v + (first + i) * head_dim + c, narrow<HALF>(x[c + i]));
    }
    for (int i = count; i < W; i++) last[i] = 0;
    bool fits = true;
    for (int i = 0; i < W; i++) fits = fits && last[i] <= 256.0f;
    return fits;
}

// Calls `one(item)` for each item; false if any call was.
template <typename One> int each(long items, int threads, One one) {
    threads = int(std::min<long>(threads, items));
    std::vector<char> good(std::max(threads, 1), 1);
    auto run = [&](int part) {
        bool fine = true;
        for (long item = items * part / threads; item < items * (part + 1) / threads; item++) fine &= one(item);
        good[part] = fine;
    };
    std::vector<std::thread> others;
    for (int part = 1; part < threads; part++) others.emplace_back(run, part);
    if (threads > 0) run(0);
    for (auto &thread : others) thread.join();
    return std::all_of(good.begin(), good.end(), [](char fine) { return fine != 0; });
}

template <bool HALF>
int quantise_keys(const std::uint16_t *k, long spans, long n, std::uint16_t *bases, std::uint8_t *units,
                  std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes, int threads) {
    return each(spans * (n / W), threads, [=](long item) {
        long span = item / (n / W), column = item % (n / W) * W;
        return key_span<HALF>(k + span * SPAN * n, n, column, bases + span * n, units + span * n,
                              zeros + span * GROUPS * n, steps + span * GROUPS / 2 * n, codes + span * SPAN / 2 * n);
    });
}

}  // namespace

extern "C" {

int kv4_quantise_keys(int half, const std::uint16_t *k, long spans, long n, std::uint16_t *bases, std::uint8_t *units,
                      std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes, int threads) {
    return half ? quantise_keys<true>(k, spans, n, bases, units, zeros, steps, codes, threads)
                : quantise_keys<false>(k, spans, n, bases, units, zeros, steps, codes, threads);
}

int kv4_quantise_values(int half, const std::uint16_t *v, long n, int head_dim, int groups, std::uint8_t *units,
                        std::uint8_t *zeros, std::uint8_t *steps, std::uint8_t *codes, int threads) {
    return each((n + W - 1) / W, threads, [=](long item) {
        int count = int(std::min<long>(W, n - item * W));
        return half ? value_block<true>(v, head_dim, groups, n, item * W, count, units, zeros, steps, codes)
                    : value_block<false>(v, head_dim, groups, n, item * W, count, units, zeros, steps, codes);
    });
}

int kv4_dequantise_keys(int half, long spans, long n, const std::uint16_t *bases, const std::uint8_t *units,
                        const std::uint8_t *zeros, const std::uint8_t *steps, const std::uint8_t *codes,
                        std::uint16_t *k, int threads) {
    long pairs = (n / W + PAIR - 1) / PAIR;
    return each(spans * pairs, threads, [=](long item) {
        long span = item / pairs, column = item % pairs * PAIR * W;
        int vectors = int(std::min<long>(PAIR, (n - column) / W));
        auto decode = half ? key_values<true> : key_values<false>;
        return decode(n, column, vectors, bases + span * n, units + span * n, zeros + span * GROUPS * n,
                      steps + span * GROUPS / 2 * n, codes + span * SPAN / 2 * n, k + span * SPAN * n);
    });
}

int kv4_dequantise_values(int half, long n, int head_dim, int groups, const std::uint8_t *units,
                          const std::uint8_t *zeros, const std::uint8_t *steps, const std::uint8_t *codes,
                          std::uint16_t *v, int threads) {
    auto decode = half ? vectors<true> : vectors<false>;
    int rows = (head_dim / groups + 1) / 2 * groups, pairs = (groups + 1) / 2;
    return each((n + TILE - 1) / TILE, threads, [=](long item) {
        alignas(64) std::uint8_t tile[(2 + MOST / 16 + MOST / 2) * TILE];
        std::uint8_t *own_zeros = tile + TILE, *own_steps = own_zeros + groups * TILE;
        std::uint8_t *own_codes = own_steps + pairs * TILE;
        long first = item * TILE;
        int count = int(std::min<long>(TILE, n - first));
        std::memcpy(tile, units + first, count);
        for (int i = 0; i < groups; i++) std::memcpy(own_zeros + i * TILE, zeros + i * n + first, count);
        for (int i = 0; i < pairs; i++) std::memcpy(own_steps + i * TILE, steps + i * n + first, count);
        for (int i = 0; i < rows; i++) std::memcpy(own_codes + i * TILE, codes + i * n + first, count);
        bool fine = true;
        for (int i = 0; i < count; i += W)
            fine &= decode(head_dim, groups, TILE, i, std::min(W, count - i), tile, own_zeros, own_steps, own_codes,
                           v + first * head_dim);
        return fine;
    });
}
}
