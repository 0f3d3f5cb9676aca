/**
 * Warehouses, each with a thread of its own, as SPECjbb 2005 runs them in one Java virtual machine. The arguments are the number
 * of warehouses and that of orders of each. To count how often a virtual machine's threads wait (scripts/guest-threads.py).
 */
public final class Warehouses {
    public static void main(String[] arguments) throws InterruptedException {
        Thread[] threads = new Thread[Integer.parseInt(arguments[0])];
        for (int number = 0; number < threads.length; number++) {
            threads[number] = new Thread(() -> Warehouse.main(new String[] {arguments[1]}), "warehouse-" + number);
            threads[number].start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
    }
}
