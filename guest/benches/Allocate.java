// An allocation benchmark: threads that make small objects and keep some of them for a while. Says how many million objects a
// second of processor time that makes, after as many that do not count.
import java.lang.management.ManagementFactory;

public class Allocate {
    static final int THREADS = 2;
    static final int OBJECTS = 10_000_000;

    static volatile Object[] kept;

    static void allocate(long seed) {
        Object[] live = new Object[4096];
        long state = seed;
        for (int at = 0; at < OBJECTS; at++) {
            state = state * 6364136223846793005L + 1442695040888963407L;
            live[(int) (state >>> 52)] = new byte[16 + (int) (state >>> 40 & 255)];
        }
        kept = live;
    }

    static void pass() throws InterruptedException {
        Thread[] threads = new Thread[THREADS];
        for (int at = 0; at < THREADS; at++) {
            long seed = at + 1;
            threads[at] = new Thread(() -> allocate(seed));
            threads[at].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
    }

    public static void main(String[] arguments) throws Exception {
        var system = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        pass();
        long begin = system.getProcessCpuTime();
        pass();
        System.out.println(THREADS * (OBJECTS * 1e3) / (system.getProcessCpuTime() - begin));
    }
}
