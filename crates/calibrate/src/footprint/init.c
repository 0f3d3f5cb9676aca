// The one program of a guest of `homenode kernel-footprint`: says that it runs, shows /proc/meminfo, and turns the guest off.
// Freestanding and static, since a guest this small has no C library; x86-64 Linux.

static long call(long number, long a, long b, long c, long d) {
    long result;
    register long r10 __asm__("r10") = d;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

enum { READ = 0, WRITE = 1, OPEN = 2, MKDIR = 83, MOUNT = 165, REBOOT = 169, PAUSE = 34 };

static void say(const char *text) {
    long length = 0;
    while (text[length])
        length++;
    call(WRITE, 1, (long)text, length, 0);
}

void _start(void) {
    static char buffer[4096];
    say("\nhomenode-epsilon: running\n");
    call(MKDIR, (long)"/proc", 0555, 0, 0);
    call(MOUNT, (long)"proc", (long)"/proc", (long)"proc", 0);
    long file = call(OPEN, (long)"/proc/meminfo", 0, 0, 0);
    long length = file < 0 ? 0 : call(READ, file, (long)buffer, sizeof buffer, 0);
    if (length > 0)
        call(WRITE, 1, (long)buffer, length, 0);
    say("homenode-epsilon: done\n");
    call(REBOOT, 0xfee1dead, 672274793, 0x4321fedc, 0);
    for (;;)
        call(PAUSE, 0, 0, 0, 0);
}
