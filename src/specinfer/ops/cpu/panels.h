// Panels of weights: those of WIDTH outputs, with what is multiplied together side by side.
//
//   type  a panel                         what is multiplied
//   fp32  [K][32]                         floats
//   fp16  [K][32]                         floats, the weights widened in registers
//   bf16  [K / 2][32][2]                  the same; or pairs by one instruction that adds to fp32
//   int8  [K / 4][32][4], 128 is zero     activations rounded to int8 for each group of 64, sums exact in a group
//   fp8   [K / 4][32][4], e4m3            as bf16, the weights widened in registers, a k and the one 2 later as a pair;
//                                         scales are of groups of 128
//   int4  [K / 8][32][4], two k's 4 apart in a byte, 8 is zero: the same for each group of 32
//
// INT8_OF_32 are as int8, LEVELS4 as int4, and LEVELS4_OF_16 too, with groups of 16. Codes of 5 and 6 bits are groups of 32 and 16 k's: their upper bits, [32][4]
// bytes with those of each fourth k, then the lower ones as in int4. A panel's scales are
//
//   BF16, FP16     [groups][32]; so are those of FP32
//   FP16_AFFINE    [groups][2][32] scales, and what is added to each weight
//   FP16_ZEROS     [groups]: [32] scales, and [32] uint8 zeros that are subtracted from codes
//   NESTED         of each 256 k's: [32] fp16, then [groups][32] int8 that they are multiplied by
//   NESTED_AFFINE  of each 256 k's: [2][32] fp16, then [groups][2][32] uint8: scales, and what is added
//
// K is filled up with zeros to a whole number of groups.

#pragma once

#include "types.h"

struct Shape {
    int64_t group, bits, zero;
    int64_t depth(int64_t inputs) const { return (inputs + group - 1) / group * group; }
    int64_t panel_bytes(int64_t inputs) const { return depth(inputs) * WIDTH * bits / 8; }
};

static Shape shape_of(int type) {
    switch (type) {
        case FP32: return {1, 32, 0};
        case FP16:
        case BF16: return {2, 16, 0};
        case INT8: return {64, 8, 128};
        case INT8_OF_32: return {32, 8, 128};
        case INT6: return {16, 6, 32};
        case INT5: return {32, 5, 16};
        case LEVELS4: return {32, 4, 128};
        case LEVELS4_OF_16: return {16, 4, 128};
        case FP8: return {128, 8, 0};
        default: return {32, 4, 8};
    }
}

// Whether activations are rounded to whole numbers.
static INLINE bool is_rounded(int type) { return type >= INT8 && type != FP8; }

static const int64_t NEST = 256;  // inputs whose groups' scales have a scale

static INLINE bool is_affine(int scaling) {
    return scaling == FP16_AFFINE || scaling == NESTED_AFFINE || scaling == FP16_ZEROS;
}

static int64_t scale_bytes(int scaling, int64_t group, int64_t depth) {
    const int64_t numbers = depth / group * WIDTH, nested = depth / NEST * WIDTH * 2;
    switch (scaling) {
        case FP16_AFFINE:
        case FP32_SCALES: return numbers * 4;
        case FP16_ZEROS: return numbers * 3;
        case NESTED: return nested + numbers;
        case NESTED_AFFINE: return nested * 2 + numbers * 2;
        default: return numbers * 2;
    }
}

static INLINE bool has_upper_bits(int type) { return type == INT5 || type == INT6; }

// A weight's code in the panels: some bits of a byte, and for some types upper bits in another one.
struct CodePlace {
    int64_t lower, upper;
    int lower_shift, lower_bits, upper_shift, upper_bits;

    CodePlace(int type, int64_t n, int64_t k, int64_t inputs) {
        const Shape shape = shape_of(type);
        const int64_t c = n % WIDTH, in_group = k % shape.group, own = k % 4;
        lower = n / WIDTH * shape.panel_bytes(inputs) + k / shape.group * (shape.group * WIDTH * shape.bits / 8);
        upper = lower + c * 4 + own;
        upper_bits = has_upper_bits(type) ? (int)shape.bits - 4 : 0;
        upper_shift = upper_bits * (int)(in_group / 4);
        lower_bits = shape.bits == 8 ? 8 : 4;
        lower_shift = shape.bits == 8 ? 0 : (int)(in_group % 8 / 4 * 4);
        lower += (upper_bits ? 4 * WIDTH : 0) + in_group / (shape.bits == 8 ? 4 : 8) * 4 * WIDTH + c * 4 + own;
    }
    int get(const uint8_t *packed) const {
        const int code = packed[lower] >> lower_shift & ((1 << lower_bits) - 1);
        return upper_bits ? code | (packed[upper] >> upper_shift & ((1 << upper_bits) - 1)) << 4 : code;
    }
};

// What weight [n][k] of a layer with codes stands for.
static float decoded(const Linear *layer, int64_t n, int64_t k) {
    const Shape shape = shape_of(layer->type);
    const int64_t group = k / shape.group, c = n % WIDTH, in_nest = NEST / shape.group;
    const int code = CodePlace(layer->type, n, k, layer->inputs).get((const uint8_t *)layer->packed);
    const uint8_t *scales = layer->scales;
    scales += n / WIDTH * scale_bytes(layer->scaling, shape.group, shape.depth(layer->inputs));
    const uint16_t *halves = (const uint16_t *)scales;
    const uint8_t *nest = scales + group / in_nest * scale_bytes(layer->scaling, shape.group, NEST);
    if (layer->type == FP8) return from_fp8((uint8_t)code) * ((const float *)scales)[group * WIDTH + c];
    const float value = (float)((layer->levels ? layer->levels[code] : code) -
                                (is_affine(layer->scaling) ? 0 : (int)shape.zero));
    switch (layer->scaling) {
        case BF16_SCALES: return value * from_bf16(halves[group * WIDTH + c]);
        case FP32_SCALES: return value * ((const float *)scales)[group * WIDTH + c];
        case FP16_SCALES: return value * from_fp16(halves[group * WIDTH + c]);
        case FP16_AFFINE:
            halves += group * 2 * WIDTH + c;
            return value * from_fp16(halves[0]) + from_fp16(halves[WIDTH]);
        case FP16_ZEROS:
            scales += group * 3 * WIDTH;
            return (value - (float)scales[2 * WIDTH + c]) * from_fp16(((const uint16_t *)scales)[c]);
        default: break;
    }
    halves = (const uint16_t *)nest + c;
    if (layer->scaling == NESTED) {
        const int8_t *own = (const int8_t *)(nest + 2 * WIDTH + group % in_nest * WIDTH);
        return value * (from_fp16(halves[0]) * (float)own[c]);
    }
    const uint8_t *own = nest + 4 * WIDTH + group % in_nest * 2 * WIDTH;
    return value * (from_fp16(halves[0]) * own[c]) + from_fp16(halves[WIDTH]) * own[WIDTH + c];
}
