#include "elf_symbol.h"

#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const char *name;
    void *address;
} Search;

typedef struct {
    const ElfW(Sym) *symbols;
    const char *strings;
    const uint32_t *hash;
} Tables;

/* Where the tables of a loaded object are. Some C libraries relocate these pointers in place, some do not. */
static Tables tables_of(const ElfW(Dyn) *dynamic, ElfW(Addr) base) {
    Tables tables = {0};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        ElfW(Addr) address = dynamic->d_un.d_ptr < base ? dynamic->d_un.d_ptr + base : dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_SYMTAB) tables.symbols = (const ElfW(Sym) *)address;
        if (dynamic->d_tag == DT_STRTAB) tables.strings = (const char *)address;
        if (dynamic->d_tag == DT_GNU_HASH) tables.hash = (const uint32_t *)address;
    }
    return tables;
}

static uint32_t gnu_hash(const char *name) {
    uint32_t hash = 5381;
    for (; *name; name++) hash = hash * 33 + (unsigned char)*name;
    return hash;
}

/* DT_GNU_HASH: counts, a Bloom filter (skipped), buckets, then one chain of hashes whose last has its low bit set. */
static const ElfW(Sym) *lookup(Tables tables, const char *name) {
    uint32_t num_buckets = tables.hash[0], first = tables.hash[1], bloom_words = tables.hash[2];
    const uint32_t *buckets = tables.hash + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = buckets + num_buckets;
    uint32_t hash = gnu_hash(name), index = num_buckets ? buckets[hash % num_buckets] : 0;
    if (index < first) return NULL;
    for (;; index++) {
        const ElfW(Sym) *symbol = &tables.symbols[index];
        uint32_t link = chain[index - first];
        if ((link | 1) == (hash | 1) && strcmp(tables.strings + symbol->st_name, name) == 0 &&
            symbol->st_shndx != SHN_UNDEF) {
            return symbol;
        }
        if (link & 1) return NULL;
    }
}

static int is_libc(const char *path) {
    const char *slash = strrchr(path, '/');
    const char *file = slash ? slash + 1 : path;
    return strncmp(file, "libc.", 5) == 0 || strncmp(file, "libc-", 5) == 0 || strncmp(file, "libdl", 5) == 0 ||
           strncmp(file, "ld-musl", 7) == 0;
}

static int visit(struct dl_phdr_info *object, size_t size, void *argument) {
    (void)size;
    Search *search = argument;
    if (object->dlpi_name == NULL || !is_libc(object->dlpi_name)) return 0;
    for (int index = 0; index < object->dlpi_phnum; index++) {
        const ElfW(Phdr) *header = &object->dlpi_phdr[index];
        if (header->p_type != PT_DYNAMIC) continue;
        Tables tables = tables_of((const ElfW(Dyn) *)(object->dlpi_addr + header->p_vaddr), object->dlpi_addr);
        if (!tables.symbols || !tables.strings || !tables.hash) return 0;
        const ElfW(Sym) *symbol = lookup(tables, search->name);
        if (symbol) search->address = (void *)(object->dlpi_addr + symbol->st_value);
    }
    return search->address != NULL;
}

void *elf_libc_function(const char *name) {
    Search search = {.name = name};
    dl_iterate_phdr(visit, &search);
    return search.address;
}
