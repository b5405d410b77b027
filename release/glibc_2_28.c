// Linked into the library of a wheel that is compiled where glibc is newer than the wheel's tag allows (release/build.sh):
// names for what newer headers and libraries refer to.

// Since 2.29 exp and log have a second version, which differs in how it sets errno.
#if defined(__x86_64__)
#define OLDEST "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST "GLIBC_2.17"
#endif
__asm__(".symver old_exp, exp@" OLDEST);
__asm__(".symver old_log, log@" OLDEST);
double old_exp(double);
double old_log(double);
// The linker puts these in the place of exp and log (--wrap).
__attribute__((visibility("hidden"))) double __wrap_exp(double x) { return old_exp(x); }
__attribute__((visibility("hidden"))) double __wrap_log(double x) { return old_log(x); }

// Since 2.32; "no" makes reference counts atomic, as older versions of libstdc++ have them.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
