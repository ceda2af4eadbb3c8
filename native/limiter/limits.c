#include "limits.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#ifndef LIMITS_FILE
#define LIMITS_FILE "/etc/kvarto/gpu-memory-limit"
#endif
#ifndef LEDGER_FILE
#define LEDGER_FILE "/run/kvarto/gpu-memory.ledger"
#endif
#define LIMITS_VARIABLE "KVARTO_GPU_MEMORY_LIMIT"
#define CONTEXT_VARIABLE "KVARTO_GPU_CONTEXT_SIZE"

enum { MAX_TEXT_BYTES = 4096 };

static bool is_mounted(void) {
    return access(LIMITS_FILE, F_OK) == 0;
}

static const char *variable(const char *name) {
    const char *text = is_mounted() ? NULL : getenv(name);
    return text && *text ? text : NULL;
}

const char *ledger_path(void) {
    const char *path = variable("KVARTO_GPU_MEMORY_LEDGER");
    return path ? path : LEDGER_FILE;
}

bool named_context_size(uint64_t *bytes) {
    const char *text = variable(CONTEXT_VARIABLE);
    return text && size_parse(text, strlen(text), bytes);
}

bool limits_are_configured(void) {
    static int answer; /* 0: not asked yet; threads that ask at once find the same */
    int known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known == 0) {
        bool is_configured = is_mounted() || variable(LIMITS_VARIABLE) || access(ledger_path(), F_OK) == 0;
        known = is_configured ? 1 : -1;
        __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    }
    return known > 0;
}

static bool unit_of(const char *name, size_t length, uint64_t *unit) {
    static const struct {
        const char *name;
        uint64_t bytes;
    } units[] = {
        {"", 1}, {"B", 1},
        {"K", 1ull << 10}, {"KIB", 1ull << 10}, {"KB", 1000ull},
        {"M", 1ull << 20}, {"MIB", 1ull << 20}, {"MB", 1000000ull},
        {"G", 1ull << 30}, {"GIB", 1ull << 30}, {"GB", 1000000000ull},
        {"T", 1ull << 40}, {"TIB", 1ull << 40}, {"TB", 1000000000000ull},
    };
    for (size_t index = 0; index < sizeof units / sizeof *units; index++) {
        if (strlen(units[index].name) == length && strncasecmp(units[index].name, name, length) == 0) {
            *unit = units[index].bytes;
            return true;
        }
    }
    return false;
}

/* Exact: the digits as one integer, times the unit, divided by the power of ten behind the point. */
bool size_parse(const char *text, size_t length, uint64_t *bytes) {
    unsigned __int128 digits = 0, scale = 1;
    size_t index = 0, num_digits = 0;
    bool is_fraction = false;
    for (; index < length && (isdigit((unsigned char)text[index]) || (text[index] == '.' && !is_fraction)); index++) {
        if (text[index] == '.') {
            is_fraction = true;
            continue;
        }
        digits = digits * 10 + (unsigned)(text[index] - '0');
        scale *= is_fraction ? 10 : 1;
        if (++num_digits > 19) return false;
    }
    uint64_t unit;
    if (num_digits == 0 || text[0] == '.' || text[index - 1] == '.') return false;
    if (!unit_of(text + index, length - index, &unit)) return false;
    unsigned __int128 value = digits * unit / scale;
    *bytes = value < UINT64_MAX ? (uint64_t)value : UINT64_MAX - 1;
    return true;
}

Word uuid_parse(const char *text, size_t length) {
    Word uuid = {.whole = 0}, none = {.whole = 0};
    unsigned char *bytes = (unsigned char *)&uuid;
    int num_digits = 0;
    if (length < 4 || (strncmp(text, "GPU-", 4) != 0 && strncmp(text, "MIG-", 4) != 0)) return none;
    for (size_t index = 4; index < length; index++) {
        char digit = (char)tolower((unsigned char)text[index]);
        if (digit == '-') continue;
        if (!isxdigit((unsigned char)digit) || num_digits == 32) return none;
        unsigned value = (unsigned)(isdigit((unsigned char)digit) ? digit - '0' : digit - 'a' + 10);
        bytes[num_digits / 2] |= (unsigned char)(num_digits % 2 ? value : value << 4);
        num_digits++;
    }
    return num_digits == 32 ? uuid : none;
}

static bool read_item(Limits *limits, const char *item, size_t length, char *error, size_t error_bytes) {
    const char *equals = memchr(item, '=', length);
    const char *size = equals ? equals + 1 : item;
    Word uuid = {.whole = 0};
    uint64_t bytes;
    if (equals && (uuid = uuid_parse(item, (size_t)(equals - item))).whole == 0) {
        snprintf(error, error_bytes, "`%.*s` is not a UUID such as `GPU-8f6d…` or `MIG-…`", (int)(equals - item),
                 item);
        return false;
    }
    if (!size_parse(size, (size_t)(item + length - size), &bytes)) {
        snprintf(error, error_bytes, "`%.*s` is not a size such as `8GiB`", (int)(item + length - size), size);
        return false;
    }
    if (limits->count == MAX_LIMITS) {
        snprintf(error, error_bytes, "more than %d limits", MAX_LIMITS);
        return false;
    }
    limits->items[limits->count].uuid = uuid;
    limits->items[limits->count++].bytes = bytes;
    return true;
}

static bool read_text(Limits *limits, const char *text, char *error, size_t error_bytes) {
    static const char separators[] = ", \t\r\n";
    for (text += strspn(text, separators); *text; text += strspn(text, separators)) {
        size_t length = strcspn(text, separators);
        if (!read_item(limits, text, length, error, error_bytes)) return false;
        text += length;
    }
    return true;
}

bool limits_read(Limits *limits, char *error, size_t error_bytes) {
    char text[MAX_TEXT_BYTES + 1] = "";
    limits->count = 0;
    FILE *file = fopen(LIMITS_FILE, "re");
    if (file) {
        size_t length = fread(text, 1, MAX_TEXT_BYTES, file);
        text[length] = '\0';
        bool is_whole = !ferror(file) && length < MAX_TEXT_BYTES;
        fclose(file);
        if (is_whole) return read_text(limits, text, error, error_bytes);
    }
    if (file || is_mounted()) {
        snprintf(error, error_bytes, "`%s` cannot be read, or is longer than %d bytes", LIMITS_FILE, MAX_TEXT_BYTES);
        return false;
    }
    const char *named = variable(LIMITS_VARIABLE), *context = variable(CONTEXT_VARIABLE);
    uint64_t bytes;
    if (context && !size_parse(context, strlen(context), &bytes)) {
        snprintf(error, error_bytes, "`%s=%s` is not a size such as `512MiB`", CONTEXT_VARIABLE, context);
        return false;
    }
    return read_text(limits, named ? named : "", error, error_bytes);
}

bool limits_find(const Limits *limits, Word uuid, uint64_t *bytes) {
    const uint64_t *found = NULL;
    for (int index = 0; index < limits->count; index++) {
        Word named = limits->items[index].uuid;
        if (named.whole == uuid.whole || (named.whole == 0 && !found)) found = &limits->items[index].bytes;
        if (named.whole == uuid.whole) break;
    }
    if (found) *bytes = *found;
    return found != NULL;
}
