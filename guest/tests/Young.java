// Allocates young objects when it is told to, and shows after each time where they went: as -Xlog:gc+heap=debug has it.
public class Young {
    static byte[] last;

    public static void main(String[] arguments) throws Exception {
        System.gc();
        System.out.println("ready");
        while (System.in.read() == '\n') {
            for (int count = 0; count < 12 * 128; count++) {
                last = new byte[8192 - 16];
            }
            System.gc();
            System.out.println("done");
        }
    }
}
